"""Commands about this machine and the command line itself."""

from semkv_bench.commands.given import Given
from semkv_bench.console import ERR, OUT, print_plain
from semkv_bench.errors import MissingError, UsageError


def models(given: Given) -> None:
    """List what can be loaded here."""
    from semkv_bench.models.catalog import as_data, catalog, show_catalog

    entries = catalog(given.overrides)
    if given.options.json:
        given.tell(as_data(entries))
    else:
        show_catalog(entries, OUT)


def doctor(given: Given) -> int:
    """Examine this machine; returns 3 where a sweep would lack something."""
    if given.arguments:
        raise UsageError(f"doctor takes --json only, not {given.arguments[0]}")
    from semkv_bench.doctor.report import as_data, examine, healthy, shown

    if given.options.json:
        with ERR.status("looking at this machine"):
            findings = list(examine())
        given.tell(as_data(findings))
    else:
        findings = list(shown(examine(), OUT))
    return 0 if healthy(findings) else MissingError.exit_code


def completion(given: Given) -> None:
    """Print a shell's completion."""
    shells = ("bash", "zsh")
    if len(given.arguments) != 1 or given.arguments[0] not in shells:
        raise UsageError("completion takes one of bash and zsh: semkv-bench completion bash")
    import argcomplete

    print_plain(argcomplete.shellcode(["semkv-bench"], shell=given.arguments[0]).strip())
