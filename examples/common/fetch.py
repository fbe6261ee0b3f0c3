"""Download archives so that a broken connection costs nothing and a broken file is noticed, and rebuild a corpus.

A file grows as ``NAME.part`` and gets its name only when its length, its checksum (where one is given) and its archive
structure are right.
"""

import argparse
import gzip
import html
import os
import re
import shutil
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zlib

from corpus import checksum, die, read_lines, replaced_folder

KNOWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "checksums.txt")
TRIES = 4
BLOCK = 1 << 20
PARTIAL, RANGE_PAST_END = 206, 416
SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>", re.DOTALL | re.IGNORECASE)


def read_checksums(path):
    """Return ``{name: checksum}`` of a file in the form of sha256sum; an md5 will do; nothing for "none"."""
    if path == "none":
        return {}
    try:
        with open(path, encoding="utf-8") as stream:
            fields = [line.split() for line in stream if line.strip() and not line.startswith("#")]
    except OSError as problem:
        die(f"--checksums {path}: {problem.strerror}")
    if any(len(pair) != 2 or not re.fullmatch("[0-9a-fA-F]{32}|[0-9a-fA-F]{64}", pair[0]) for pair in fields):
        die(f"--checksums {path}: every line must be 'SHA256  NAME'")
    return {os.path.basename(name.lstrip("*")): digest.lower() for digest, name in fields}


def fetch(url, folder, checksums):
    """Return the path of the archive at ``url`` in ``folder``, downloaded unless a sound copy is there."""
    name = url.rsplit("/", 1)[-1]
    path = os.path.join(folder, name)
    os.makedirs(folder, exist_ok=True)
    if not os.path.exists(path):
        part = path + ".part"
        print(f"  fetching {url}", flush=True)
        download(url, part)
        problem = find_fault(part, checksums.get(name))
        if problem:
            os.remove(part)
            die(
                f"{url}: {problem}; nothing was kept, run the same command again, give another --data-url,"
                " or take it as it is with --checksums none"
            )
        if name not in checksums:
            print(f"  sha256 {checksum(part)}, and none to compare it with", flush=True)
        os.rename(part, path)
    return path


def download(url, part):
    """Fetch ``url`` into ``part``, going on where an earlier attempt ended; several tries."""
    for attempt in range(1, TRIES + 1):
        try:
            stream_to_file(url, part)
            return
        except urllib.error.HTTPError as problem:
            if problem.code == RANGE_PAST_END:
                return
            reason = f"HTTP {problem.code} {problem.reason}"
            if problem.code < 500:
                break
        except (OSError, ValueError) as problem:
            reason = str(getattr(problem, "reason", problem))
            if url.startswith("file:"):
                break
        if attempt < TRIES:
            print(f"  {reason}; trying again", flush=True)
            time.sleep(2**attempt)
    die(
        f"cannot fetch {url}: {reason}; run the same command again (it goes on where it stopped),"
        " or use --data DIR or --data-tar FILE"
    )


def stream_to_file(url, part):
    done = os.path.getsize(part) if os.path.exists(part) and not url.startswith("file:") else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    with urllib.request.urlopen(request, timeout=60) as response:
        goes_on = done and response.status == PARTIAL
        done = done if goes_on else 0
        total = int(response.headers.get("Content-Length") or 0) + done
        with open(part, "ab" if goes_on else "wb") as stream:
            done = copy_with_progress(response, stream, done, total)
    if total and done < total:
        raise OSError(f"the connection ended after {done:,} of {total:,} bytes")


def copy_with_progress(response, stream, done, total):
    shown = time.time()
    for block in iter(lambda: response.read(BLOCK), b""):
        stream.write(block)
        done += len(block)
        if time.time() - shown >= 10:
            shown = time.time()
            print(f"  {done / 1e6:,.0f} of {total / 1e6:,.0f} MB", flush=True)
    return done


def find_fault(path, expected=None):
    """Say what is wrong with an archive: empty, another checksum, not a whole tar file; ``None`` if it is sound."""
    if not os.path.getsize(path):
        return "the file is empty"
    if expected:
        kind = "md5" if len(expected) == 32 else "sha256"
        found = checksum(path, kind)
        if found != expected.lower():
            return f"{kind} is {found}, not {expected.lower()}"
    try:
        with gzip.open(path) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            for _ in archive:
                pass
            while stream.read(BLOCK):  # gzip's own checksum comes last
                pass
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError) as problem:
        return f"not a whole tar.gz archive ({problem})"
    return None


def extract(archive, members, folder):
    """Extract single files; ``members`` maps a new name to the end of the name inside the archive.

    Returns the names that the archive does not hold.
    """
    missing = dict(members)
    with tarfile.open(archive) as stream:
        for entry in stream:
            for name, wanted in list(missing.items()):
                if entry.isfile() and ("/" + entry.name).endswith("/" + wanted):
                    with open(os.path.join(folder, name), "wb") as target:
                        shutil.copyfileobj(stream.extractfile(entry), target)
                    del missing[name]
    return list(missing)


def read_segments(path):
    """Return the segments of an SGM or XML evaluation set, one line each."""
    return [" ".join(html.unescape(text).split()) for text in SEGMENT.findall("\n".join(read_lines(path)))]


def write_lines(path, lines):
    with open(path, "w", encoding="utf-8") as stream:
        stream.writelines(line + "\n" for line in lines)


def rebuild(description, urls, build):
    """The program that rebuilds a German-English corpus from archives.

    ``urls`` maps a key of ours to the home of an archive.  ``build(archives, langs, work, out)`` gets the paths of the
    archives by key, and writes {train,valid,test}.LANG to ``out``, with the folder ``work`` for what it extracts.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--source-lang", required=True)
    parser.add_argument("--target-lang", required=True)
    parser.add_argument("--archives", required=True, help="folder to keep the archives in")
    parser.add_argument("--out", required=True, help="folder to write {train,valid,test}.{de,en} to")
    parser.add_argument("--url", default="", help="folder that holds all archives, instead of their homes")
    parser.add_argument("--checksums", default="", help="file of sha256 sums, or none (default: ours, without --url)")
    args = parser.parse_args()
    langs = (args.source_lang, args.target_lang)
    if sorted(langs) != ["de", "en"]:
        die(f"this corpus is German-English, not {langs[0]}-{langs[1]}: give your own text with --data")
    checksums = read_checksums(args.checksums or ("none" if args.url else KNOWN))
    if args.url:
        urls = {key: f"{args.url.rstrip('/')}/{url.rsplit('/', 1)[-1]}" for key, url in urls.items()}
    archives = {key: fetch(url, args.archives, checksums) for key, url in urls.items()}
    print("  unpacking", flush=True)
    with replaced_folder(args.out) as out, tempfile.TemporaryDirectory(dir=out) as work:
        build(archives, langs, work, out)
