"""Shell completion: the script for bash and zsh, and what it offers behind a verb."""

import os
import re
from collections.abc import Iterable

from cramming.config import UserError
from cramming.overrides import SIDE, compose, with_implied


def script(shell: str, verbs: Iterable[str]) -> str:
    """A script for the shell's `eval`: completes the verb, then asks Hydra for the groups and settings."""
    if shell not in ("bash", "zsh"):
        raise UserError(f"completion knows bash and zsh, not {shell!r}")
    prefix = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return prefix + _SCRIPT.format(verbs=" ".join([*verbs, "completion"]))


# Hydra's own script cannot serve: it would ask `cramming -sc query=bash`, which has no verb.
_SCRIPT = """_cramming() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" choices="{verbs}"
    if [ "$COMP_CWORD" -gt 1 ]; then
        local -a words=($COMP_LINE)
        word="${{COMP_LINE##* }}"
        choices=$(COMP_LINE="$COMP_LINE" cramming "${{words[1]}}" -sc query=bash 2>/dev/null)
    fi
    COMPREPLY=($(compgen -o nospace -W "$choices" -- "$word"))
}}
COMP_WORDBREAKS=${{COMP_WORDBREAKS//=}}
complete -o nospace -o default -F _cramming cramming"""


def offer(verb: str, line: str) -> None:
    """What may be typed for the verb's positional, on stdout; what Hydra then completes, in the environment: the line
    without its verb and what Hydra cannot read: flags of ours, a positional, a duel's sides, what is in quotes.
    """
    *before, last = [*line.split()[2:], *[""] * line.endswith(" ")]
    settings = [
        word for word in before if re.fullmatch(rf"(?!{SIDE.pattern}=)[^-'\"][^'\"]*=[^'\"]+", word)
    ]
    os.environ["COMP_LINE"] = " ".join(["cramming", *with_implied(settings), last])
    if not before and verb == "study":
        print("vocab pipelines", *compose()["study"]["variants"])
    elif not before and verb == "duel":
        print("ladder")
