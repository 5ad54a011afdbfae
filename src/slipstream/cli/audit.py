"""`slipstream audit`: a certificate that speculation changed nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.flags.flags import Values, with_flags
from slipstream.cli.flags.options import ENGINE, SPECULATION, Json, chosen_speculation, print_json
from slipstream.cli.flags.remote import TIMED_SAMPLING, api_key_of, metrics_url_of
from slipstream.cli.output.console import notes, wide_results
from slipstream.cli.output.loading import say_loading
from slipstream.cli.output.writing import Overwrite, check_file, check_folder, unwritable, write_text
from slipstream.core.model_path import check_model_path
from slipstream.errors import ConfigError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine
    from slipstream.tools.audit.certificate import Certificate
    from slipstream.tools.audit.journal import AuditJournal
    from slipstream.tools.audit.mix import Profile
    from slipstream.tools.audit.remote.side import ServerSide
    from slipstream.tools.audit.settings import AuditSettings

_SERVERS = "Servers"
CERTIFICATE, PAGE = "certificate.json", "audit.html"


@with_flags(sampling=TIMED_SAMPLING, speculation=SPECULATION, engine=ENGINE)
def audit(
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL|URL]",
            help="A checkpoint folder or hub id, whose engine is audited here, or an OpenAI-compatible server, as in "
            "http://localhost:8000/v1; the embedded pair by default.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="A server to compare with: the same without speculation, or another engine.",
            rich_help_panel=_SERVERS,
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The server's target, loaded here, which scores its tokens; `embedded` is that of the embedded pair. "
            "The engine's flags are its.",
            rich_help_panel=_SERVERS,
        ),
    ] = None,
    answers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests to each side; 300 by default, 2000 where sampled answers can only be compared as samples.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most tokens in an answer.")] = 64,
    confidence: Annotated[
        float, typer.Option(help="An honest engine is certified with at least this probability.")
    ] = 0.99,
    temperature: Annotated[
        float | None,
        typer.Option(help="With any sampling flag all answers have these parameters, instead of a mix."),
    ] = None,
    mix: Annotated[
        str | None,
        typer.Option(
            help="full, served, common, samples, plain or greedy; by default what both sides understand alike."
        ),
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            "--workload", "-w", help="Prompts: sample, FILE.jsonl, spec-bench:FILE or sharegpt:FILE."
        ),
    ] = "sample",
    num_prompts: Annotated[
        int, typer.Option("--prompts", min=1, help="The most different prompts, each asked several times.")
    ] = 40,
    seed: Annotated[int, typer.Option(min=0, help="All that is random in the audit is derived from it.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests running at once.")] = 8,
    tie_margin: Annotated[
        float | None,
        typer.Option(help="Nats: differences with smaller margins are near-ties. Measured by default."),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Give prompts and conversations as plain text, without the chat template."
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help=f"A folder for {CERTIFICATE}, {PAGE} and the answers; created if it does not exist."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the answers in the folder of --output.")
    ] = False,
    overwrite: Overwrite = False,
    json: Json = False,
    served_model: Annotated[
        str | None,
        typer.Option(
            help="The model's name at the server; by default the first that it lists.",
            rich_help_panel=_SERVERS,
        ),
    ] = None,
    against_model: Annotated[
        str | None, typer.Option(help="The same for --against.", rich_help_panel=_SERVERS)
    ] = None,
    metrics_url: Annotated[
        str | None,
        typer.Option(
            help="Its Prometheus metrics; by default /metrics beside /v1.", rich_help_panel=_SERVERS
        ),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(help="Environment variable with the servers' API key.", rich_help_panel=_SERVERS),
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option(
            min=0.001, help="Seconds without a byte until a request fails.", rich_help_panel=_SERVERS
        ),
    ] = 600.0,
    *,
    sampling: Values,
    speculation: Values,
    engine: Values,
) -> None:
    """Certify that speculation changes nothing: tokens, texts, usage, finish reasons, counters.

    Exits with 0 where it is certified, 1 where it is not, and 2 where the audit could not tell.
    """
    from slipstream.assets.workload.reading import read_workload
    from slipstream.tools.audit.mix import mix_of, one_profile

    questions = read_workload(workload)
    is_server = subject is not None and "://" in subject
    for path in (None if is_server else subject, reference):
        if path not in (None, "embedded"):
            check_model_path(path)
    given = {**sampling, **({} if temperature is None else {"temperature": temperature})}
    if mix is not None and given:
        raise ConfigError("--mix and sampling flags both choose the parameters; give one of them")
    profiles = one_profile(given) if given else None if mix is None else mix_of(mix)
    if not is_server:
        names = {"--against": against, "--reference": reference, "--served-model": served_model}
        _refuse({**names, "--against-model": against_model}, "is about a server; give its URL")
    elif against is not None and reference is not None:
        raise ConfigError("--against and --reference both say what to compare with; give one of them")
    _check_output(output, resume, overwrite)
    say_loading(subject, "auditing")

    from slipstream.tools.audit.journal import FILE, AuditJournal
    from slipstream.tools.audit.settings import AuditSettings

    settings = AuditSettings(
        workload=questions,
        num_answers=answers or 300,
        max_tokens=max_tokens,
        num_prompts=num_prompts,
        seed=seed,
        confidence=confidence,
        concurrency=concurrency,
        tie_margin=tie_margin,
        raw=raw,
    )
    journal = AuditJournal(None if output is None else output / FILE, resume)
    try:
        if is_server:
            _refuse(
                {f"--{name.replace('_', '-')}": value for name, value in speculation.items()},
                "is for an engine in this process; the server has its own speculation",
            )
            servers = _Servers(api_key_env, timeout_s, raw)
            first = servers.side("audited", subject or "", served_model, metrics_url)
            second = None if against is None else servers.side("against", against, against_model, None)
            certificate = _audit_server(
                settings, first, second, _reference(reference, engine), profiles, answers is not None, journal
            )
        else:
            certificate = _audit_engine(settings, subject, speculation, engine, profiles, journal)
        _deliver(certificate, json, output)
    except (SlipstreamError, BrokenPipeError):
        raise
    except Exception as error:  # 1 would say that the engine is not certified
        if unwritable(error) is not None:
            raise
        raise SlipstreamError(
            f"the audit itself failed, and nothing is certified: {type(error).__name__}: {error}"
        ) from error
    if certificate.interrupted:
        raise typer.Exit(130)
    raise typer.Exit(certificate.exit_code)


class _Servers:
    """Addresses from flags."""

    def __init__(self, api_key_env: str | None, timeout_s: float, raw: bool) -> None:
        self._key = api_key_of(api_key_env)
        self._timeout_s = timeout_s
        self._raw = raw

    def side(self, name: str, url: str, model: str | None, metrics_url: str | None) -> ServerSide:
        """A server; asks it for its model where none is given."""
        from slipstream.rpc.client import ServerAddress, find_model, find_url
        from slipstream.tools.audit.remote.side import ServerSide

        url = find_url(url, self._key, self._timeout_s)
        model = model or find_model(url, self._key, self._timeout_s)
        address = ServerAddress(url, model, metrics_url or metrics_url_of(url), self._key, self._timeout_s)
        return ServerSide(name, address, raw=self._raw)


def _reference(model: str | None, engine: Values) -> Engine | None:
    """The engine of the reference, without speculation; raises `ConfigError` for its flags without one."""
    if model is None:
        _refuse(
            {f"--{name.replace('_', '-')}": value for name, value in engine.items()}, "is for --reference"
        )
        return None
    from slipstream.engine.factory import make_engine

    return make_engine(
        None if model == "embedded" else model, None, {**engine, "enable_prefix_caching": False}
    )


def _audit_server(
    settings: AuditSettings,
    first: ServerSide,
    second: ServerSide | None,
    reference: Engine | None,
    profiles: Any,
    has_own_size: bool,
    journal: AuditJournal,
) -> Certificate:
    from slipstream.tools.audit.remote.audit import RemoteAudit, run_remote

    return run_remote(RemoteAudit(settings, first, second, reference, profiles, has_own_size, journal))


def _audit_engine(
    settings: AuditSettings,
    model: str | None,
    speculation: Values,
    engine: Values,
    profiles: Sequence[Profile] | None,
    journal: AuditJournal,
) -> Certificate:
    speculative = chosen_speculation(speculation, model)
    if speculative.method == "off":
        raise ConfigError("there is no speculation to audit; choose a drafter, as in --spec ngram")
    from slipstream.tools.audit.local import LocalAudit, run_local

    plan = LocalAudit(settings, speculative, model, engine, journal=journal)
    return run_local(plan if profiles is None else replace(plan, profiles=profiles))


def _refuse(flags: dict[str, Any], why: str) -> None:
    for name, value in flags.items():
        if value is not None:
            raise ConfigError(f"{name} {why}")


def _check_output(output: Path | None, resume: bool, overwrite: bool) -> None:
    """Raise `ConfigError` before any work where the files cannot be written."""
    if output is None:
        if resume:
            raise ConfigError("--resume needs the folder of --output, which holds the answers")
        return
    check_folder(output)
    if output.exists() and not resume:
        from slipstream.tools.audit.journal import FILE

        for name in (CERTIFICATE, PAGE, FILE):
            check_file(output / name, overwrite)


def _deliver(certificate: Certificate, json: bool, output: Path | None) -> None:
    """Write the certificate and print it; files first, so that a closed pipe does not lose them."""
    from slipstream.tools.audit.report import audit_tables, render_certificate, verdict

    if output is not None:
        text = dumps(certificate.as_json(), ensure_ascii=False, indent=1)
        write_text(output / CERTIFICATE, text + "\n")
        write_text(output / PAGE, render_certificate(certificate))
    if json:
        print_json(certificate.as_json())
    else:
        console = wide_results()
        for grid in audit_tables(certificate):
            console.print(grid.rich())
        for line in (*(f"note: {note}" for note in certificate.notes), verdict(certificate)):
            console.print(line, markup=False, soft_wrap=True)
    if output is not None:
        for name in (CERTIFICATE, PAGE):
            notes().print(f"written: {output / name}", markup=False)
