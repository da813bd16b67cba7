"""The shell's completion of `cramming`'s words."""

from collections.abc import Iterable

SHELLS = ("bash", "zsh")


def completion_script(shell: str, verbs: Iterable[str]) -> str:
    """A script for the shell's `eval`: completes the verb, then asks Hydra for the groups and settings."""
    prefix = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return prefix + _BASH_COMPLETION.format(verbs=" ".join([*verbs, "completion"]))


# Hydra's own script cannot serve: it would ask `cramming -sc query=bash`, which has no verb.
_BASH_COMPLETION = """_cramming() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" choices="{verbs}"
    if [ "$COMP_CWORD" -gt 1 ]; then
        local -a words=($COMP_LINE)
        word="${{COMP_LINE##* }}"
        choices=$(COMP_LINE="cramming ${{COMP_LINE#* * }}" cramming "${{words[1]}}" -sc query=bash 2>/dev/null)
    fi
    COMPREPLY=($(compgen -o nospace -W "$choices" -- "$word"))
}}
COMP_WORDBREAKS=${{COMP_WORDBREAKS//=}}
complete -o nospace -o default -F _cramming cramming"""
