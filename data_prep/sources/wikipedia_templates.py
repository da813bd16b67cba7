"""Inline templates of Wikipedia: those that are part of a sentence become text, all others go.

A dump names templates and does not hold what they expand to. Most are infoboxes, citations and navigation; without
those of the table below a sentence has a hole: "a road of  in length". They are the most used ones of the English
Wikipedia as far as we know it: no dump was at hand to count in.
"""

import re
from calendar import month_name
from collections.abc import Callable

_INNERMOST = re.compile(r"\{\{([^{}]*)\}\}")
_BETWEEN_PARAMETERS = re.compile(r"\|(?![^\[\]]*\]\])")  # not in [[link|text]]
_NAME = re.compile(r"[\w -]+")

_MOST_DIGITS = 20  # of what is a number in an article; Python refuses to read one of thousands

Parameters = dict[str, str]  # by name; those without one as "1", "2" ...
Text = str | Callable[[Parameters], str]  # what a template becomes; of a string `{}` is the first parameter


def expand_templates(wikitext: str) -> str:
    """The wikitext with inline templates as their text and without others, from the innermost on.

    Templates that hold other braces, such as a table's, are left.
    """
    count = 1
    while count:
        wikitext, count = _INNERMOST.subn(_text_of, wikitext)
    return wikitext


def _text_of(template: re.Match[str]) -> str:
    name, bar, rest = template[1].partition("|")
    name = " ".join(name.replace("_", " ").split()).lower()
    if name.startswith("formatnum:"):  # a function of MediaWiki's: its value stands behind the colon
        name, rest = "formatnum", f"{name.partition(':')[2]}{bar}{rest}"
    text = INLINE.get(name) or next((text for start, text in _BY_PREFIX.items() if name.startswith(start)), "")
    given = _parameters(rest)
    return text.format(given.get("1", "")) if isinstance(text, str) else text(given)


def _parameters(given: str) -> Parameters:
    found: Parameters = {}
    for part in _BETWEEN_PARAMETERS.split(given):
        name, sign, value = part.partition("=")
        if sign and _NAME.fullmatch(name):
            found[name.strip()] = value.strip()
        else:
            found[str(len(_listed(found)) + 1)] = part.strip()
    return found


def _listed(given: Parameters) -> list[str]:
    """The parameters without a name, in their order."""
    return [value for name, value in given.items() if name.isdecimal()]


def _parameter(number: int) -> Text:
    """This parameter; the last one before it where there are fewer."""
    return lambda given: ["", *_listed(given)][: number + 1][-1]


def _years(sign: str, between: str = " – ") -> Text:
    return lambda given: f"{sign} {between.join(_listed(given))}".strip()


def _grouped(value: str) -> str:
    if value.isdecimal() and len(value) <= _MOST_DIGITS:
        return f"{int(value):,}"
    return value.replace("+", " ")  # 5+1/2


def _number(given: Parameters) -> str:
    value = given.get("1", "")
    return value if given.get("2", "").upper() == "R" else _grouped(value)


def _fraction(given: Parameters) -> str:
    numbers = _listed(given)
    numbers = ["1", *numbers] if len(numbers) == 1 else numbers
    return " ".join([*numbers[:-2], "/".join(numbers[-2:])])


_RANGE = {"-": "–", "–": "–", "x": " × ", "×": " × ", "+/-": " ± "} | {w: f" {w} " for w in ("to", "and", "or", "by")}
_COMPOUND = {"mi", "yd", "ft", "st", "lb", "cwt"}  # 6 ft 2 in
_UNITS = {"sqmi": "sq mi", "sqft": "sq ft", "sqkm": "km²", "km2": "km²", "m2": "m²", "m3": "m³", "C": "°C", "F": "°F"}


def _quantity(given: Parameters) -> str:
    """A quantity, without the unit that it is converted to: "5 to 10 km", "6 ft 2 in"."""
    first, *values = [*_listed(given), ""]
    text = _grouped(first)
    while len(values) > 1 and values[0] in _RANGE:
        text += _RANGE[values[0]] + _grouped(values[1])
        values = values[2:]
    text += f" {_UNITS.get(values[0], values[0])}"
    if len(values) > 2 and values[0] in _COMPOUND and values[1].isdecimal() and values[2]:
        text += f" {values[1]} {values[2]}"
    return text.strip()


def _as_of(given: Parameters) -> str:
    year, month, *_ = [*_listed(given), "", ""]
    words = "Since" if given.get("since") else "As of"
    named = month_name[int(month)] if month.isdecimal() and len(month) <= 2 and int(month) <= 12 else month
    words = given.get("alt") or " ".join(filter(None, [words, named, year]))
    return words[:1].lower() + words[1:] if given.get("lc") else words


def _with_origin(given: Parameters) -> str:
    """A Japanese name: "Tokyo Tower (東京タワー, Tōkyō tawā)"."""
    shown, *others = [*_listed(given), ""]
    origin = ", ".join(filter(None, others[:2]))
    return f"{shown} ({origin})" if shown and origin else shown or origin


def _with_unit(given: Parameters) -> str:
    return " ".join(filter(None, [given.get("1"), given.get("u") or given.get("ul")]))


def _quotation(given: Parameters) -> str:
    return f"\n{given.get('text') or given.get('quote') or given.get('1', '')}\n"


_FIRST, _SECOND, _LAST = _parameter(1), _parameter(2), _parameter(9)
_SHIPS = ("uss", "hms", "ss", "rms", "ms", "mv", "hmas", "hmcs", "sms")
# Names with "_" for " ", in lower case -> what stands there.
_TABLE: tuple[tuple[str, Text], ...] = (
    ("nowrap nobr nobreak small smaller big large smallcaps sc em strong nobold noitalic sub sup", _FIRST),
    ("math mvar chem2 abbr tooltip ill interlanguage_link flag flagcountry vanchor visible_anchor", _FIRST),
    ("linktext nihongo2 sic not_a_typo typo as_written proper_name hebrew polytonic unicode", _FIRST),
    ("lang langx wikt-lang rtl-lang", _SECOND),
    ("transl transliteration tlit color font_color", _LAST),
    ("convert cvt", _quantity),
    ("formatnum", _number),
    ("val", _with_unit),
    ("frac sfrac fraction", _fraction),
    ("circa c. ca.", _years("c.", " – c. ")),
    ("floruit fl.", _years("fl.")),
    ("reign r.", _years("r.")),
    ("as_of", _as_of),
    ("nihongo nihongo3 nihongo_foot", _with_origin),
    ("quote blockquote quotation bquote cquote poemquote", _quotation),
    ("ship oldstyledate oldstyledatedy oldstyledateny", lambda given: " ".join(_listed(given)[:2])),
    ("chem gaps", lambda given: "".join(_listed(given))),
    ("us$ usd", "US${}"),
    ("£ gbp", "£{}"),
    ("€ euro eur", "€{}"),
    ("inr indian_rupee", "₹{}"),
    ("¥ jpy yen", "¥{}"),
    ("sqrt radic", "√{}"),
    ("e", "×10^{}"),
    *((prefix, f"{prefix.upper()} {{}}") for prefix in _SHIPS),
    ("' apostrophe", "'"),
    ("'s", "'s"),
    ("'\"", "'\""),
    ("\"'", "\"'"),
    ("– ndash endash en_dash", "–"),
    ("— mdash emdash em_dash", "—"),
    ("snd spnd spaced_ndash spaced_en_dash", " – "),
    ("spaced_mdash spaced_em_dash", " — "),
    ("nbsp space spaces thinsp thin_space hairsp nnbsp", " "),
    ("· • dot middot", " · "),
    ("× times", "×"),
    ("minus", "−"),
    ("pi", "π"),
    ("deg", "°"),
    ("!", "|"),
    ("=", "="),
)  # fmt: skip
INLINE: dict[str, Text] = {name.replace("_", " "): text for names, text in _TABLE for name in names.split()}
_BY_PREFIX: dict[str, Text] = {"lang-": _FIRST, "script/": _FIRST}
