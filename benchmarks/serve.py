"""Load of `fairseq-deep serve`: throughput and latency by batch size, 10,000 requests at once, kill and restart.

    pip install prometheus-client starlette uvicorn
    python benchmarks/serve.py exp/demo --input news.en

MODEL is what `fairseq-deep serve` takes, for one language pair. The file has one sentence per line, and each request
one of them. Three parts:

- closed loop: C clients send one request after the other over connections that stay open, for each batch size of the
  server; the table has requests per second and the 50th and 99th percentile of their time
- at once: N clients connect, then each sends one request; every answer is compared with the translator's
- kill: half of the answers after the start of a closed loop, SIGKILL ends the server; another takes the same port, and
  the clients repeat what was not answered

Hypotheses have at most `--longest` units. The limit of fairseq, a x source + b, takes the longest source of the batch,
so what a weak model repeats up to the limit would depend on the batch. Batches can also change rounding, and so the
choice between hypotheses of nearly equal scores: an answer that is not the translator's best one is looked for among
its hypotheses of the same sentence ("rounding").
"""

import argparse
import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time

from turns import describe_machine

from fairseq_deep.runtime import Translator
from fairseq_deep.tools.input_text import read_lines
from fairseq_deep.tools.tables import format_table


def read_arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="folder of a recipe or of a packaged model, or checkpoint")
    parser.add_argument("--input", required=True, metavar="FILE", help="raw text, a sentence a line")
    parser.add_argument("--at-once", type=int, default=10_000, metavar="N", help="(default: 10000)")
    parser.add_argument("--longest", type=int, default=100, metavar="N", help="units of a hypothesis (default: 100)")
    parser.add_argument("--requests", type=int, default=400, metavar="N", help="of a closed loop (default: 400)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64, 256], metavar="C")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16, 64], metavar="B")
    return parser.parse_args(words)


class Server:
    """A server in a process of its own."""

    def __init__(self, args, port=0, batch_size=64):
        command = [sys.executable, "-m", "fairseq_deep", "serve", args.model, "--port", port,
                   "--batch-size", batch_size, "--max-len-a", 0, "--max-len-b", args.longest,
                   "--max-queue", 1_000_000, "--timeout", 3600, "--cpu"]  # fmt: skip
        begun = time.monotonic()
        self.process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if '"event": "ready"' in line:
                break
        else:
            raise SystemExit("the server did not start; run the command by hand: " + " ".join(map(str, command)))
        self.start_seconds = time.monotonic() - begun
        self.port = int(json.loads(line)["url"].rpartition(":")[2])
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def stop(self, number=signal.SIGTERM):
        """The exit status after a signal."""
        self.process.send_signal(number)
        return self.process.wait()

    def peak_mib(self):
        """Most memory that it has used."""
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as status:
            return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


async def connect(port):
    """A connection; a full backlog is waited for."""
    while True:
        try:
            return await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.1)


async def ask(streams, line, pair):
    """Status and fields of the answer to one request."""
    reader, writer = streams
    body = json.dumps({"q": line, "source": pair[0], "target": pair[1]}).encode()
    head = "POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    top = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    length = next(int(each.split(":")[1]) for each in top if each.startswith("content-length"))
    return int(top[0].split()[1]), json.loads(await reader.readexactly(length))


async def closed_loop(port, lines, clients, pair, on_answer=lambda count: None):
    """Answers by number, the time of each, and how many requests were repeated."""
    rest, answers, times, repeated = iter(range(len(lines))), {}, [], 0

    async def client():
        nonlocal repeated
        streams = await connect(port)
        for number in rest:
            while number not in answers:
                begun = time.monotonic()
                try:
                    status, fields = await ask(streams, lines[number], pair)
                    assert status == 200, fields
                    answers[number] = fields["translatedText"]
                    times.append(time.monotonic() - begun)
                    on_answer(len(answers))
                except (OSError, asyncio.IncompleteReadError):
                    repeated += 1
                    streams = await connect(port)
        streams[1].close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers, times, repeated


async def at_once(port, lines, pair):
    """Answers and their times; all connections are open before the first request is sent."""
    streams = []
    for first in range(0, len(lines), 500):
        streams += await asyncio.gather(*(connect(port) for _ in lines[first : first + 500]))

    async def timed(number):
        status, fields = await ask(streams[number], lines[number], pair)
        assert status == 200, fields
        return fields["translatedText"], time.monotonic() - begun

    begun = time.monotonic()
    found = await asyncio.gather(*map(timed, range(len(lines))))
    return dict(enumerate(text for text, _ in found)), [seconds for _, seconds in found]


def percentile(values, share):
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def compare(answers, lines, expected, translator):
    """How the answers compare with the translator's."""
    differ = [number for number in range(len(lines)) if answers.get(number) != expected[number]]
    lost = [number for number in differ if number not in answers]
    others = translator.translate_nbest([lines[number] for number in differ])
    rounding = [number for number, found in zip(differ, others) if answers.get(number) in [each.text for each in found]]
    mixed = len(differ) - len(lost) - len(rounding)
    return (f"{len(lines) - len(differ):,} of {len(lines):,} equal, {len(rounding)} rounding, {len(lost)} lost, "
            f"{mixed} mixed up; {len(set(answers.values())):,} distinct translations")  # fmt: skip


def measure(args, lines, pair):
    """The table of closed loops."""
    rows = [("batch size", "clients", "requests/s", "p50 ms", "p99 ms")]
    for size in args.batch_sizes:
        server = Server(args, batch_size=size)
        asyncio.run(closed_loop(server.port, lines[:50], 4, pair))  # warm
        for clients in args.clients:
            count = max(args.requests if clients > 1 else args.requests // 4, 4 * clients)
            some, begun = (lines * (count // len(lines) + 1))[:count], time.monotonic()
            _, times, _ = asyncio.run(closed_loop(server.port, some, clients, pair))
            pace = count / (time.monotonic() - begun)
            p50, p99 = (1000 * percentile(times, share) for share in (0.5, 0.99))
            rows.append((str(size), str(clients), f"{pace:.1f}", f"{p50:.0f}", f"{p99:.0f}"))
        server.stop()
    return format_table(rows, right=range(5))


def kill(args, lines, pair, translator, expected):
    """One line about a server that is killed and restarted."""
    servers = [Server(args)]
    restarted = threading.Thread(target=lambda: servers.append(Server(args, servers[0].port)))

    def on_answer(count):
        if count == len(lines) // 2:
            servers[0].stop(signal.SIGKILL)
            restarted.start()

    answers, _, repeated = asyncio.run(closed_loop(servers[0].port, lines, 64, pair, on_answer))
    restarted.join()
    code = servers[1].stop()
    return (f"kill: {compare(answers, lines, expected, translator)}; {repeated:,} attempts repeated, restarted in "
            f"{servers[1].start_seconds:.1f} s, exit status after SIGTERM {code}")  # fmt: skip


def main(words=None):
    args = read_arguments(words)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    lines = read_lines(args.input)
    many = (lines * (args.at_once // len(lines) + 1))[: args.at_once]
    print(describe_machine(), f"\n{os.getloadavg()[0]:.1f} other processes ready to run, as a mean of the last minute")
    translator = Translator(args.model, cpu=True, max_len_a=0, max_len_b=args.longest)
    pair = translator.source_lang, translator.target_lang
    begun = time.monotonic()
    expected = translator.translate(many)
    print(f"translator alone, lines sorted by length: {len(many) / (time.monotonic() - begun):.1f} lines/s", flush=True)
    translator.nbest = translator.options.beam
    print(measure(args, lines, pair), flush=True)

    server = Server(args)
    begun = time.monotonic()
    answers, times = asyncio.run(at_once(server.port, many, pair))
    p50, p99 = (percentile(times, share) for share in (0.5, 0.99))
    print(f"at once: {compare(answers, many, expected, translator)}; {len(many) / max(times):.1f} requests/s, "
          f"p50 {p50:.1f} s, p99 {p99:.1f} s, {server.peak_mib():.0f} MiB, connected in "
          f"{time.monotonic() - begun - max(times):.1f} s, exit status after SIGTERM {server.stop()}")  # fmt: skip
    print(kill(args, many[:1000], pair, translator, expected))


if __name__ == "__main__":
    main()
