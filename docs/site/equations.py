"""A hook of mkdocs that turns the equations of pages into MathML when the site is built, without JavaScript.

pymdownx.arithmatex finds the equations, and latex2mathml converts them. The converter accepts many mistakes silently,
so this module checks what it reads and writes; a broken equation stops the build.
"""

import html
import re
from xml.etree import ElementTree

from latex2mathml.converter import convert

EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)
ENVIRONMENTS = {"array", "bmatrix", "cases", "matrix", "pmatrix", "split"}
CHILDREN = {"mfrac": 2, "mroot": 2, "msub": 2, "msup": 2, "mover": 2, "munder": 2, "msubsup": 3, "munderover": 3}
OPENING = tuple("([{⟨⌊⌈|‖")
OPERATORS = {"~": "∼", ";": ";", ":": ":", "±": "±"}  # the converter takes them for identifiers
TIGHT = {"|", "‖", "/"}
LIMITS = {"argmax", "argmin", "inf", "lim", "max", "min", "sup"}


def check_latex(tex):
    """Raise ValueError for LaTeX that the converter would drop silently."""
    bare = re.sub(r"\\.", "", tex, flags=re.S)
    if bare.count("{") != bare.count("}"):
        raise ValueError("braces do not match")
    unknown = set(re.findall(r"\\(?:begin|end)\{(.*?)\}", tex)) - ENVIRONMENTS
    if unknown:
        raise ValueError(f"unknown environment {min(unknown)}; choose from {', '.join(sorted(ENVIRONMENTS))}")
    if re.search(r"\\(def|newcommand|operatorname(?!\*?\{\w))", tex):
        raise ValueError("macros are not supported, and \\operatorname requires a name")


def check_mathml(root):
    """Raise ValueError for unknown commands and missing arguments, which the converter leaves in its output."""
    for element in root.iter():
        command = re.match(r"\\[A-Za-z]+", element.text or "")
        if command:
            raise ValueError(f"unknown command {command[0]}")
        if len(element) != CHILDREN.get(element.tag, len(element)):
            raise ValueError(f"{element.tag} has {len(element)} of {CHILDREN[element.tag]} arguments")
        if element.get("mathvariant", "normal") not in ("normal", "italic"):  # browsers ignore the others
            raise ValueError(f"{element.get('mathvariant')} '{element.text}' is not supported; use \\mathbf")


def set_names(root, display):
    """Write names of functions upright, with LaTeX's space around them, and their limits below them in a display."""
    for parent in root.iter():
        if display and parent.tag == "msub" and parent[0].text in LIMITS:
            parent.tag = "munder"
        for child, follower in zip(parent, [*parent[1:], None]):
            text = child.text or ""
            if child.tag in ("mi", "mo") and len(text) > 1 and text.isalpha():
                opened = follower is None or "".join(follower.itertext()).startswith(OPENING)
                child.tag, child.attrib = "mo", {"lspace": "0.167em", "rspace": "0" if opened else "0.167em"}
            elif child.tag == "mo" and text in TIGHT:
                child.attrib |= {"lspace": "0", "rspace": "0"}
            elif child.tag == "mi" and text in OPERATORS:
                child.tag, child.text = "mo", OPERATORS[text]
    for parent in root.iter():
        letters = [child.text for child in parent if child.tag == "mi" and child.get("mathvariant") == "normal"]
        if len(letters) > 1 and len(letters) == len(parent):  # \mathrm{LN} is one name, not two
            name = ElementTree.Element("mi")
            name.text = "".join(letters)
            parent[:] = [name]


def mathml(tex, display=False):
    """Convert *tex* to one ``math`` element; raise ValueError if it is not a complete equation."""
    check_latex(tex)
    try:
        converted = convert(tex, display="block" if display else "inline")
        root = ElementTree.fromstring(re.sub(r' xmlns="[^"]*"', "", converted))
    except ElementTree.ParseError:
        raise ValueError("'&' requires an environment; escape it as '\\&'") from None
    except Exception as error:
        # the converter's errors have no common base, and most have no message
        raise ValueError(str(error) or re.sub(r"(?<!^)([A-Z])", r" \1", type(error).__name__).lower()) from error
    check_mathml(root)
    set_names(root, display)
    return ElementTree.tostring(root, encoding="unicode")


def replace_equations(content):
    """Replace each equation that arithmatex has marked in a page; raise ValueError for a broken one."""

    def replace(found):
        tex = html.unescape(found[2]).strip()
        try:
            return f'<{found[1]} class="equation">{mathml(tex, found[1] == "div")}</{found[1]}>'
        except ValueError as error:
            raise ValueError(f"equation '{tex}': {error}") from error

    content = EQUATION.sub(replace, content)
    if "$$" in re.sub(r"(?s)<code.*?</code>", "", content):
        raise ValueError("an equation between lines '$$' must be a paragraph of its own")
    return content


def on_page_content(content, page, **kwargs):
    """Stop the build with the name of the page if one of its equations is broken."""
    from mkdocs.exceptions import PluginError  # the tests run without mkdocs

    try:
        return replace_equations(content)
    except ValueError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error
