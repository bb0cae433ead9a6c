"""The settings of each process: what can be set, in which unit, between which bounds, with which relations.

A setting comes, the first that has it wins, from the environment (`TICKWHEEL_POSTGRES_URL`), from the
process's own table in a TOML file (`[timer]`), from that file's top level, or from its default.
`TICKWHEEL_CONFIG` names the file:

    postgres_url = "postgresql://tickwheel@db1,db2/tickwheel?target_session_attrs=read-write"
    etcd_endpoints = ["https://etcd1:2379", "https://etcd2:2379"]

    [timer]
    listen_port = 7071

All is judged at the start, all faults at once: a process that would misbehave under load does not come up.
"""

from __future__ import annotations

import os
import socket
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from tickwheel.errors import TickwheelError

ENVIRONMENT_PREFIX = "TICKWHEEL_"
CONFIG_FILE_VARIABLE = "TICKWHEEL_CONFIG"
GRPC_MESSAGE_BYTES_MAX = 4 * 1024 * 1024

# In the environment a list has commas; in TOML it is a list.
Texts = Annotated[tuple[str, ...], NoDecode, Field(min_length=1)]
Text = Annotated[str, Field(min_length=1, max_length=255)]
Port = Annotated[int, Field(ge=0, le=65_535)]

SettingsT = TypeVar("SettingsT", bound="CommonSettings")


class ConfigurationInvalid(TickwheelError):
    """A process cannot start with these settings. `problems`: a sentence for each fault, with its setting."""

    def __init__(self, section: str, problems: tuple[str, ...]) -> None:
        self.section = section
        self.problems = problems
        lines = "".join(f"\n  {problem}" for problem in problems)
        super().__init__(f"the settings of the {section} cannot be used:{lines}")


class CommonSettings(BaseSettings):
    """What every process has."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
    )
    section: ClassVar[str] = "process"

    node_name: Text = Field(default_factory=socket.gethostname)
    """Shown to people, in logs and lists."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level that is written."""
    log_format: Literal["auto", "json", "console"] = "auto"
    """auto: console on a terminal, else one JSON object a line."""
    otlp_endpoint: str = ""
    """Where traces go (OTLP over gRPC), such as `http://127.0.0.1:4317`. Unset: no traces, at no cost."""
    trace_sample_ratio: float = Field(0.01, ge=0, le=1)
    """The part of new traces that is recorded."""
    metrics_host: Text = "127.0.0.1"
    """The address of `/metrics` and `/healthz`."""
    metrics_port: Port | None = None
    """The port of `/metrics` and `/healthz`; 0 lets the system choose; unset: not served."""
    drain_timeout_ms: int = Field(10_000, ge=0, le=3_600_000)
    """After SIGTERM: how long work may take to end before it is handed back."""
    exit_timeout_ms: int = Field(3_000, ge=100, le=60_000)
    """After that: how long each of releasing and closing may take."""
    loop_lag_warning_ms: int = Field(100, ge=1, le=60_000)
    """A loop that is late by more writes a warning, once in ten seconds at most."""
    loop_lag_stuck_ms: int = Field(5_000, ge=100, le=600_000)
    """A loop that has not moved for longer makes the process unhealthy."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        from_file = InitSettingsSource(settings_cls, init_kwargs=_file_settings(cls))
        return init_settings, env_settings, from_file

    def relations(self) -> Iterator[str]:
        """A sentence for each relation between settings that does not hold, with the values on both sides."""
        yield from require_less(self, "loop_lag_warning_ms", "loop_lag_stuck_ms")

    @model_validator(mode="after")
    def _relations_hold(self) -> Self:
        broken = tuple(self.relations())
        if broken:
            raise ValueError("\n".join(broken))
        return self


class ClusterSettings(CommonSettings):
    """What the processes have that stand on Postgres and etcd."""

    postgres_url: Text = Field()
    """The source of truth. Several hosts with `target_session_attrs=read-write` follow a failover."""
    postgres_pool_connections_max: int = Field(8, ge=2, le=1_000)
    """Connections of one process, at most."""
    postgres_connect_timeout_ms: int = Field(3_000, ge=100, le=60_000)
    """For one attempt to connect."""
    etcd_endpoints: Texts = ("http://127.0.0.1:2379",)
    """URLs, all http or all https."""
    etcd_prefix: str = Field("/tickwheel/", pattern=r"^/.*/$")
    """Before every key; one for each cluster."""
    etcd_call_timeout_ms: int = Field(1_000, ge=50, le=60_000)
    """The deadline of one call."""
    etcd_ca_file: str | None = None
    """PEM, for https."""
    etcd_cert_file: str | None = None
    """PEM, a client certificate."""
    etcd_key_file: str | None = None
    """PEM, its key."""
    etcd_user: str | None = None
    """For an etcd with authentication."""
    etcd_password: SecretStr | None = None
    """For that user."""
    etcd_lease_ttl_ms: int = Field(3_000, ge=2_000, le=60_000)
    """How long a process may be silent before its shards or its leadership go to another."""
    listen_host: Text = "127.0.0.1"
    """The address on which gRPC is served."""
    listen_port: Port = 0
    """The port of gRPC; 0 lets the system choose."""
    external_address: str = ""
    """`host:port` under which others reach this process. Unset: the address that it listens on."""

    @field_validator("etcd_endpoints", mode="before")
    @classmethod
    def _split_endpoints(cls, value: object) -> object:
        return _split(value)

    @field_validator("etcd_endpoints")
    @classmethod
    def _endpoints_are_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        schemes = {endpoint.partition("://")[0] for endpoint in value}
        if schemes not in ({"http"}, {"https"}):
            raise ValueError("each must be a URL such as http://127.0.0.1:2379, all http or all https")
        return value

    def relations(self) -> Iterator[str]:
        yield from super().relations()
        yield from require_less(self, "etcd_call_timeout_ms", "etcd_lease_ttl_ms")
        if (self.etcd_cert_file is None) != (self.etcd_key_file is None):
            files = f"etcd_cert_file ({self.etcd_cert_file}) and etcd_key_file ({self.etcd_key_file})"
            yield f"{files} go together"
        if (self.etcd_user is None) != (self.etcd_password is None):
            yield f"etcd_user ({self.etcd_user}) and etcd_password go together"


class CoordinatorSettings(ClusterSettings):
    """The process that serves the API; one of them, the leader, assigns shards."""

    section: ClassVar[str] = "coordinator"

    shard_count: int = Field(256, ge=1, le=4_096)
    """For a new cluster. Fixed for its life: afterwards what the database says holds."""
    reconcile_interval_ms: int = Field(2_000, ge=100, le=60_000)
    """The leader looks at all assignments this often, whatever watches say."""
    api_transaction_timeout_ms: int = Field(5_000, ge=100, le=60_000)
    """The longest that one call may hold a transaction."""
    page_count_max: int = Field(1_000, ge=1, le=10_000)
    """Items of one page, at most."""
    batch_runs_max: int = Field(10_000, ge=1, le=100_000)
    """Runs of one BatchCreateRuns, at most."""
    nudge_timeout_ms: int = Field(500, ge=10, le=10_000)
    """How long telling a shard's owner of new work may take."""
    nudge_queue_max: int = Field(100_000, ge=1, le=10_000_000)
    """Nudges that wait. More are dropped, and the timers' sweep finds the work."""
    request_id_days: int = Field(7, ge=1, le=90)
    """How long a request_id is remembered."""


class TimerSettings(ClusterSettings):
    """The process that owns shards and grants leases."""

    section: ClassVar[str] = "timer"

    attempt_lease_ttl_ms: int = Field(10_000, ge=1_000, le=86_400_000)
    """How long a worker owns an attempt unrenewed."""
    heartbeat_interval_ms: int = Field(3_333, ge=100, le=3_600_000)
    """How often workers are asked to renew."""
    takeover_ms_max: int = Field(3_000, ge=500, le=60_000)
    """The longest from a dead timer's lapse in etcd until its workers are renewed by another."""
    seen_interval_ms: int = Field(1_000, ge=100, le=10_000)
    """How often the timer stamps in Postgres that it lives."""
    assignment_poll_interval_ms: int = Field(3_000, ge=100, le=60_000)
    """How often all assignments are read, whatever the watch says."""
    fence_lock_timeout_ms: int = Field(500, ge=10, le=10_000)
    """How long taking a shard waits for its fence before those who hold it are terminated."""
    lookahead_bucket_count: int = Field(2, ge=1, le=60)
    """Minutes of due time that are loaded ahead."""
    load_page_count: int = Field(20_000, ge=100, le=1_000_000)
    """Timers of one page of a load."""
    wheel_count_max: int = Field(20_000_000, ge=1_000, le=1_000_000_000)
    """Timers in memory, at most; the rest stays in Postgres."""
    tenant_share_count_max: int = Field(1_000_000, ge=1, le=100_000_000)
    """Due timers of one tenant in memory, at most; the rest stays in Postgres."""
    grant_batch_count_max: int = Field(2_000, ge=1, le=20_000)
    """Grants of one fenced call, at most."""
    grant_batch_wait_ms: int = Field(2, ge=0, le=1_000)
    """How long a batch that is not full waits for more."""
    outcome_batch_count_max: int = Field(2_000, ge=1, le=20_000)
    """Outcomes of one fenced call, at most."""
    sweep_after_ms: int = Field(1_000, ge=100, le=60_000)
    """Rows overdue by more that the wheel does not hold are found by the sweep."""
    full_sweep_interval_ms: int = Field(60_000, ge=1_000, le=3_600_000)
    """How often all rows are swept, not only those after the low-watermark."""
    decide_after_ms: int = Field(30_000, ge=1_000, le=3_600_000)
    """An occurrence that was not granted for so long becomes a waiting run."""
    stream_message_bytes_max: int = Field(1_048_576, ge=16_384, le=GRPC_MESSAGE_BYTES_MAX)
    """One message to a worker, at most."""
    stream_queue_bytes_max: int = Field(67_108_864, ge=1_048_576, le=4_294_967_296)
    """What waits to be sent to one worker, at most."""

    def relations(self) -> Iterator[str]:
        yield from super().relations()
        if self.heartbeat_interval_ms * 3 > self.attempt_lease_ttl_ms:
            yield (
                f"heartbeat_interval_ms * 3 ({self.heartbeat_interval_ms * 3}) must be at most "
                f"attempt_lease_ttl_ms ({self.attempt_lease_ttl_ms}): a renewal needs three tries"
            )
        if self.attempt_lease_ttl_ms <= self.etcd_lease_ttl_ms + self.takeover_ms_max:
            yield (
                f"attempt_lease_ttl_ms ({self.attempt_lease_ttl_ms}) must be more than etcd_lease_ttl_ms + "
                f"takeover_ms_max ({self.etcd_lease_ttl_ms + self.takeover_ms_max}): "
                "else the death of a timer stops work that runs"
            )
        yield from require_less(self, "seen_interval_ms", "etcd_lease_ttl_ms")
        yield from require_less(self, "sweep_after_ms", "full_sweep_interval_ms")
        if self.stream_message_bytes_max * 2 > self.stream_queue_bytes_max:
            yield (
                f"stream_message_bytes_max * 2 ({self.stream_message_bytes_max * 2}) must be at most "
                f"stream_queue_bytes_max ({self.stream_queue_bytes_max})"
            )


class WorkerSettings(CommonSettings):
    """The process that executes attempts. It knows coordinators only; they tell it where the timers are."""

    section: ClassVar[str] = "worker"

    coordinators: Texts = ("127.0.0.1:7070",)
    """`host:port` of one or more; any will do."""
    tenants: Texts = ("default",)
    """The tenants that are served."""
    queues: Texts = ("default",)
    """The queues of those tenants that are served."""
    pool: str = Field("default", min_length=1, max_length=63)
    """The pool that this worker belongs to."""
    handlers_module: str = ""
    """Imported at the start; registers handlers. Unset: built-in kinds only."""
    capacity: int = Field(100, ge=1, le=20_000)
    """Attempts that run at once, at most."""
    threads: int = Field(16, ge=1, le=1_000)
    """Threads for handlers that are not async."""
    lease_margin_ms: int = Field(500, ge=0, le=60_000)
    """So much before its lease can be given away, an attempt is stopped."""

    @field_validator("coordinators", "tenants", "queues", mode="before")
    @classmethod
    def _split_texts(cls, value: object) -> object:
        return _split(value)


PROCESSES: tuple[type[CommonSettings], ...] = (CoordinatorSettings, TimerSettings, WorkerSettings)


def load_settings(settings: type[SettingsT], **overrides: Any) -> SettingsT:
    """The settings of this process; `overrides` win over everything. Raises ConfigurationInvalid."""
    try:
        return settings(**overrides)
    except ValidationError as error:
        raise ConfigurationInvalid(settings.section, tuple(_problems(error))) from error


def require_less(settings: CommonSettings, smaller: str, larger: str) -> Iterator[str]:
    """The sentence, if `smaller` is not less than `larger`."""
    left, right = getattr(settings, smaller), getattr(settings, larger)
    if not left < right:
        yield f"{smaller} ({left}) must be less than {larger} ({right})"


def settings_table(settings: type[CommonSettings]) -> str:
    """The reference of a process's settings, as a Markdown table."""
    rows = ["| setting | default | bounds | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{name}` | {_default_text(field)} | {_bounds_text(field)} | {field.description} |"
        for name, field in settings.model_fields.items()
    ]
    return "\n".join(rows) + "\n"


def settings_reference() -> str:
    """docs/reference/settings.md, from the classes."""
    parts = ["# Settings\n\n", "Written by `make docs` from `runtime/config.py`: change it there.\n"]
    parts += [
        f"\n## {settings.section.capitalize()}\n\n{settings.__doc__}\n\n{settings_table(settings)}"
        for settings in PROCESSES
    ]
    return "".join(parts)


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "the host's name"
    if field.default is None or field.default == "":
        return "unset"
    value = ",".join(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{value}`"


def _bounds_text(field: FieldInfo) -> str:
    signs = (("ge", "≥"), ("le", "≤"))
    return ", ".join(
        f"{sign} {getattr(rule, key):,}"
        for rule in field.metadata
        for key, sign in signs
        if hasattr(rule, key)
    )


def _split(value: object) -> object:
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _file_settings(settings: type[CommonSettings]) -> dict[str, Any]:
    """What the TOML file says for this process. Raises ConfigurationInvalid for what cannot be meant."""
    name = os.environ.get(CONFIG_FILE_VARIABLE)
    if not name:
        return {}
    try:
        tables = tomllib.loads(Path(name).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        problem = f"{name} ({CONFIG_FILE_VARIABLE}): {error}"
        raise ConfigurationInvalid(settings.section, (problem,)) from error
    sections = {process.section: process for process in PROCESSES}
    known = {field for process in PROCESSES for field in process.model_fields}
    common = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    strays = [f"{name}: there is no setting `{key}`" for key in common if key not in known]
    for key, table in tables.items():
        if isinstance(table, dict):
            fields = sections[key].model_fields if key in sections else {}
            strays += [
                f"{name}: there is no setting `{key}.{stray}`" for stray in table if stray not in fields
            ]
    if strays:
        raise ConfigurationInvalid(settings.section, tuple(strays))
    mine = {key: value for key, value in common.items() if key in settings.model_fields}
    return {**mine, **tables.get(settings.section, {})}


def _problems(error: ValidationError) -> Iterator[str]:
    for fault in error.errors():
        name = ".".join(str(part) for part in fault["loc"])
        message = fault["msg"].removeprefix("Value error, ")
        if not name:  # A relation, which names its settings itself.
            yield from message.splitlines()
        elif fault["type"] == "missing":
            yield f"{name} is required: set {ENVIRONMENT_PREFIX}{name.upper()}, or `{name}` in the TOML file"
        else:
            # A URL may hold a password, so what stands there is not repeated.
            shown = "" if "password" in name or "url" in name else f" ({fault['input']!r})"
            yield f"{name}{shown}: {message}"
