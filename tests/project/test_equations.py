"""Equations of pages: docs/site/equations.py turns them into MathML, and rejects broken ones."""

import importlib.util
import re
from xml.etree import ElementTree

import pytest

from tests.helpers.docs import PAGES
from tests.helpers.paths import ROOT

pytest.importorskip("latex2mathml")
SPEC = importlib.util.spec_from_file_location("equations", ROOT / "docs/site/equations.py")
equations = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(equations)
DISPLAY = re.compile(r"(?ms)^ *\$\$$(.*?)^ *\$\$$")
INLINE = re.compile(r"(?<![\\$\w])\$(?!\s)((?:\\.|[^\\$])+?)(?<!\s)\$(?!\w)")


def plain(element):
    """The tags and texts of an element without rows, which only group."""
    inside = "".join(filter(None, [(element.text or "").strip(), *map(plain, element)]))
    return inside if element.tag in ("mrow", "math") else f"{element.tag}({inside})"


@pytest.mark.parametrize("tex, expected", [
    (r"\frac{1}{\sqrt{d}}", "mfrac(mn(1)msqrt(mi(d)))"),
    (r"\sum_{k=0}^{l} y_k", "munderover(mo(∑)mi(k)mo(=)mn(0)mi(l))msub(mi(y)mi(k))"),
    (r"\max_i x", "munder(mo(max)mi(i))mi(x)"), (r"\operatorname{LN}(x)", "mo(LN)mo(()mi(x)mo())"),
    (r"\mathrm{FFN}(x)", "mi(FFN)mo(()mi(x)mo())"),
    (r"\left[ \hat{x}; y \right]", "mo([)mover(mi(x)mo(^))mo(;)mi(y)mo(])"),
    (r"\begin{split} a &= b \end{split}", "mtable(mtr(mtd(mi(a))mtd(mimo(=)mi(b))))"),
])  # fmt: skip
def test_an_equation_of_each_kind(tex, expected):
    found = ElementTree.fromstring(equations.mathml(tex, display=True))
    assert plain(found).replace("\xa0", "").replace("mi()", "mi") == expected
    assert found.get("display") == "block"


@pytest.mark.parametrize("tex, problem", [
    (r"\frac{a}", "mfrac has 1 of 2 arguments"), (r"\foo{x}", r"unknown command \foo"), (r"{x", "braces do not match"),
    (r"x_a_b", "double subscripts error"), (r"\left( x", "missing right"), ("", "no available tokens"),
    (r"a & b", "'&' requires an environment"), (r"\def\x{y} \x", "macros are not supported"),
    (r"\begin{aligned} a &= b \end{aligned}", "unknown environment aligned; choose from array"),
    (r"\boldsymbol{x}", r"bold-italic 'x' is not supported; use \mathbf"),
])  # fmt: skip
def test_a_broken_equation_is_an_error_that_names_it(tex, problem):
    page = rf'<p>Text</p><div class="arithmatex">\[{tex.replace("&", "&amp;")}\]</div>'
    with pytest.raises(ValueError) as error:
        equations.replace_equations(page)
    assert str(error.value).startswith(f"equation '{tex}': ") and problem in str(error.value)


def test_equations_of_a_page_are_replaced_and_code_is_not():
    page = r'<p>Let <span class="arithmatex">\(a &lt; b\)</span>, <code>$$</code> and $5.</p>'
    assert equations.replace_equations(page) == (
        '<p>Let <span class="equation"><math display="inline"><mrow><mi>a</mi><mo>&lt;</mo><mi>b</mi></mrow></math>'
        "</span>, <code>$$</code> and $5.</p>"
    )
    with pytest.raises(ValueError, match="a paragraph of its own"):
        equations.replace_equations("<p>Text $$ x $$</p>")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_equations_of_all_pages(page):
    text = re.sub(r"(?ms)^ *```.*?^ *```|^    .*?$|`[^`]*`", "", (ROOT / page).read_text(encoding="utf-8"))
    for tex in DISPLAY.findall(text):
        equations.mathml(tex.strip(), display=True)
    for tex in INLINE.findall(DISPLAY.sub("", text)):
        equations.mathml(tex)
