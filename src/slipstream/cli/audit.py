"""`slipstream audit`: a certificate that speculation changed nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from slipstream.cli.flags.flags import filled, refuse, with_flags
from slipstream.cli.flags.options import EngineValues, Json, SpeculationValues, Workload, chosen_speculation
from slipstream.cli.flags.remote import MeasuredServerFlags, TimedSampling
from slipstream.cli.output.loading import say_loading
from slipstream.cli.output.results import files_in, print_json, print_report, say_written, write_json
from slipstream.cli.output.writing import Overwrite, check_folder, unwritable, write_text
from slipstream.core.model_path import check_model_path
from slipstream.errors import ConfigError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine
    from slipstream.tools.audit.certificate import Certificate
    from slipstream.tools.audit.journal import AuditJournal
    from slipstream.tools.audit.mix import Profile
    from slipstream.tools.audit.remote.side import ServerSide
    from slipstream.tools.audit.settings import AuditSettings

CERTIFICATE, PAGE = "certificate.json", "audit.html"


@dataclass(frozen=True, kw_only=True)
class AuditServerFlags(MeasuredServerFlags):
    """An audit of a server."""

    served_model: str | None = None
    """The model's name at the server; by default the first that it lists."""
    api_key_env: str | None = None
    """Environment variable with the servers' API key."""
    against: str | None = None
    """A server to compare with: the same without speculation, or another engine."""
    against_model: str | None = None
    """The same for --against."""
    reference: Annotated[str | None, Option(metavar="MODEL")] = None
    """The server's target, loaded here, which scores its tokens; `embedded` is that of the embedded pair. The engine's
    flags are its."""

    def sides(self, url: str, raw: bool) -> tuple[ServerSide, ServerSide | None]:
        """The audited server and the one that it is compared with, where one was named."""
        from slipstream.tools.audit.remote.side import ServerSide

        first = ServerSide("audited", self.measured(url), raw=raw)
        if self.against is None:
            return first, None
        return first, ServerSide("against", self.address(self.against, self.against_model), raw=raw)


@dataclass(frozen=True, kw_only=True)
class AuditFlags:
    """What is audited, and how."""

    subject: Annotated[str | None, Argument(metavar="[MODEL|URL]")] = None
    """A checkpoint folder or hub id, whose engine is audited here, or an OpenAI-compatible server, as in
    http://localhost:8000/v1; the embedded pair by default."""
    answers: Annotated[int | None, Option(min=1)] = None
    """Requests to each side; 300 by default, 2000 where sampled answers can only be compared as samples."""
    max_tokens: Annotated[int, Option(min=1)] = 64
    """The most tokens in an answer."""
    confidence: float = 0.99
    """An honest engine is certified with at least this probability."""
    temperature: float | None = None
    """With any sampling flag all answers have these parameters, instead of a mix."""
    mix: str | None = None
    """full, served, common, samples, plain or greedy; by default what both sides understand alike."""
    workload: Workload = "sample"
    num_prompts: Annotated[int, Option("--prompts", min=1)] = 40
    """The most different prompts, each sent several times."""
    seed: Annotated[int, Option(min=0)] = 0
    """All that is random in the audit is derived from it."""
    concurrency: Annotated[int, Option(min=1)] = 8
    """Requests running at once."""
    tie_margin: float | None = None
    """Nats: differences with smaller margins are near-ties. Measured by default."""
    raw: Annotated[bool, Option("--raw")] = False
    """Give prompts and conversations as plain text, without the chat template."""
    output: Path | None = None
    """A folder for certificate.json, audit.html and the answers; created if it does not exist."""
    resume: Annotated[bool, Option("--resume")] = False
    """Go on with the answers in the folder of --output."""
    overwrite: Overwrite = False
    json: Json = False
    server: Annotated[AuditServerFlags, "Servers"]
    sampling: TimedSampling
    speculation: SpeculationValues
    engine: EngineValues

    @property
    def is_server(self) -> bool:
        """Whether the subject is a server."""
        return self.subject is not None and "://" in self.subject

    def check(self) -> None:
        """Raise `ConfigError` for contradictions, and where files cannot be written, before any work."""
        for path in (None if self.is_server else self.subject, self.server.reference):
            if path not in (None, "embedded"):
                check_model_path(path)
        if self.mix is not None and self.given_sampling():
            raise ConfigError("--mix and sampling flags both choose the parameters; give one of them")
        server = self.server
        if not self.is_server:
            names = ("against", "reference", "served_model", "against_model")
            refuse({name: getattr(server, name) for name in names}, "is about a server; give its URL")
        elif server.against is not None and server.reference is not None:
            raise ConfigError("--against and --reference both say what to compare with; give one of them")
        if self.output is None and self.resume:
            raise ConfigError("--resume needs the folder of --output, which holds the answers")
        if self.output is not None and self.resume:
            check_folder(self.output)
        elif self.output is not None:
            from slipstream.tools.audit.journal import FILE

            files_in(self.output, (CERTIFICATE, PAGE, FILE), self.overwrite)

    def given_sampling(self) -> dict[str, Any]:
        """The sampling parameters of all answers; none is a mix."""
        return {**self.sampling, **({} if self.temperature is None else {"temperature": self.temperature})}


@with_flags
def audit(flags: AuditFlags) -> None:
    """Certify that speculation changes nothing: tokens, texts, usage, finish reasons, counters.

    Exits with 0 where it is certified, 1 where it is not, and 2 where the audit could not tell.
    """
    from slipstream.assets.workload.reading import read_workload
    from slipstream.tools.audit.mix import mix_of, one_profile

    questions = read_workload(flags.workload)
    flags.check()
    given = flags.given_sampling()
    profiles = one_profile(given) if given else None if flags.mix is None else mix_of(flags.mix)
    say_loading(flags.subject, "auditing")

    from slipstream.tools.audit.journal import FILE, AuditJournal
    from slipstream.tools.audit.settings import AuditSettings

    settings = filled(AuditSettings, flags, workload=questions, num_answers=flags.answers or 300)
    journal = AuditJournal(None if flags.output is None else flags.output / FILE, flags.resume)
    try:
        run = _audit_server if flags.is_server else _audit_engine
        certificate = run(flags, settings, profiles, journal)
        _deliver(certificate, flags.json, flags.output)
    except (SlipstreamError, BrokenPipeError):
        raise
    except Exception as error:  # 1 would say that the engine is not certified
        if unwritable(error) is not None:
            raise
        raise SlipstreamError(
            f"the audit itself failed, and nothing is certified: {type(error).__name__}: {error}"
        ) from error
    raise typer.Exit(130 if certificate.interrupted else certificate.exit_code)


def _reference(model: str | None, engine: dict[str, Any]) -> Engine | None:
    """The engine of the reference, without speculation; raises `ConfigError` for its flags without one."""
    if model is None:
        refuse(engine, "is for --reference")
        return None
    from slipstream.engine.factory import make_engine

    options = {**engine, "enable_prefix_caching": False}
    return make_engine(None if model == "embedded" else model, None, options)


def _audit_server(
    flags: AuditFlags, settings: AuditSettings, profiles: Sequence[Profile] | None, journal: AuditJournal
) -> Certificate:
    from slipstream.tools.audit.remote.audit import RemoteAudit, run_remote

    refuse(flags.speculation, "is for an engine in this process; the server has its own speculation")
    first, second = flags.server.sides(flags.subject or "", flags.raw)
    reference = _reference(flags.server.reference, flags.engine)
    has_own_size = flags.answers is not None
    return run_remote(RemoteAudit(settings, first, second, reference, profiles, has_own_size, journal))


def _audit_engine(
    flags: AuditFlags, settings: AuditSettings, profiles: Sequence[Profile] | None, journal: AuditJournal
) -> Certificate:
    speculative = chosen_speculation(flags.speculation, flags.subject)
    if speculative.method == "off":
        raise ConfigError("there is no speculation to audit; choose a drafter, as in --spec ngram")
    from slipstream.tools.audit.local import LocalAudit, run_local

    plan = LocalAudit(settings, speculative, flags.subject, flags.engine, journal=journal)
    return run_local(plan if profiles is None else replace(plan, profiles=profiles))


def _deliver(certificate: Certificate, json: bool, output: Path | None) -> None:
    from slipstream.tools.audit.report import audit_tables, render_certificate, verdict

    if output is not None:
        write_json(output / CERTIFICATE, certificate.as_json())
        write_text(output / PAGE, render_certificate(certificate))
    if json:
        print_json(certificate.as_json())
    else:
        remarks = [f"note: {note}" for note in certificate.notes]
        print_report(audit_tables(certificate), [*remarks, verdict(certificate)])
    if output is not None:
        say_written(output / name for name in (CERTIFICATE, PAGE))
