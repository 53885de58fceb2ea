"""cloze completion: what bash and zsh need to complete commands, recipes and options.

    eval "$(cloze completion)"      in ~/.bashrc or ~/.zshrc

The script asks the commands themselves for their options and recipes.
"""

import sys
from collections.abc import Sequence
from typing import Final

from cloze.command import COMMANDS, run
from cloze.encoding.errors import OptionError

__all__ = ["main"]

SCRIPT: Final = r"""if [ -n "${ZSH_VERSION:-}" ]; then
    whence compdef > /dev/null || { autoload -U +X compinit && compinit; }
    autoload -U +X bashcompinit && bashcompinit
fi
_cloze() {
    local cloze="${COMP_WORDS[0]}" name="${COMP_WORDS[1]}" word="${COMP_WORDS[COMP_CWORD]}" recipe="" words=""
    case "$COMP_CWORD $name $word" in
        "1 "*) words="@COMMANDS@" ;;
        *" "*" -"*)
            [ "$name" != fit ] || [ "$COMP_CWORD" = 2 ] || recipe="${COMP_WORDS[2]}"
            words="$("$cloze" "$name" ${recipe:+"$recipe"} --help 2>/dev/null)"
            words="$(echo "$words" | grep -oE -e '--[a-z][a-z0-9-]*' | sort -u)" ;;
        "2 fit "*) words="$("$cloze" fit 2>/dev/null | sed -n 's/^  \([a-z-]*\)  .*/\1/p')" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _cloze cloze
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises OptionError where a word is given."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in (["-h"], ["--help"]):
        print('usage: cloze completion\n\nIn ~/.bashrc or ~/.zshrc: eval "$(cloze completion)"')
        return
    if words:
        raise OptionError(f"completion takes no arguments, and was given {words[0]!r}: one script serves bash and zsh")
    print(SCRIPT.replace("@COMMANDS@", " ".join(COMMANDS)), end="")


if __name__ == "__main__":
    sys.exit(run(main))
