"""`show`, `events`, `logs`: the verbs that read. None of them starts or changes anything."""

from __future__ import annotations

import contextlib
import time
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from gyre.api.cli.completion import jobs as job_names
from gyre.api.cli.completion import roles as role_names
from gyre.api.cli.context import CliContext, verb
from gyre.api.cli.output import moment, remark, say, write_json, write_json_line, write_table
from gyre.api.terminal.formats import duration, incident_message, local_time, number, one_line, times_of
from gyre.api.terminal.text_tables import Column, rows_of
from gyre.errors import GyreError
from gyre.master.incident_words import came_to, has_recovered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gyre.api.reader import JobReader
    from gyre.failover.evaluation import Shown
    from gyre.logs.reading import LogQuery
    from gyre.rollouts.plane.reported import EngineColumn

LOG_POLL_S = 0.5
IMPORTANT = ("reward_mean", "loss", "grad_norm", "kl", "entropy", "completion_tokens_mean")
LABELS = {"prompts": "prompts_drawn"}
"""What a number of a trainer's report is called, where its name does not say it."""
DETAILS = (
    "reward",
    "accuracy_first",
    "accuracy_version",
    "tokens_per_s",
    "step_s",
    "staleness",
    "staleness_mean",
    "digest",
)
"""Entries of the trainer's report that `show` has in other rows; -v has them."""

SHOWN_VERTICES = 200
SHOWN_INCIDENTS = 20
SHOWN_EVALUATIONS = 4
"""Of each held-out set, the newest, beside the first."""
SHOWN_NODE = 12
"""Characters shown of a node's id, whose 56 digits are for programs."""

FACT_COLUMNS = (Column("", least=8), Column("", least=24, wraps=True))


@verb()
@click.argument("job", required=False, shell_complete=job_names)
@click.argument("incident", required=False)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Add how each role spends its time, and everything that the trainer reports.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def show(session: CliContext, job: str | None, incident: str | None, verbose: bool, as_json: bool) -> None:
    """Show a job: its progress, master, vertices and incidents, and its result once it has ended.

    INCIDENT shows one incident with all of its evidence: its id, its number from 1 on, or a vertex for its last one.
    """
    with session.reader() as reader:
        view = reader.view(reader.find(job).job_id)
        if incident is not None:
            _show_incident(reader, view, incident, as_json)
            return
        steps = account = None
        if not as_json:
            with contextlib.suppress(GyreError):  # the store is away: the rows are left out
                steps, account = reader.steps_judged(view), reader.account(view)
    if as_json:
        from gyre.observe.efficiency import efficiency_of

        write_json({**view, "efficiency": efficiency_of(view, time.time())})
    else:
        show_view(view, steps, account, verbose=verbose)


def _show_incident(reader: JobReader, view: dict[str, Any], name: str, as_json: bool) -> None:
    from gyre.api.terminal.incident_text import blocks_of, events_around, facts_of, incident_named

    incident = incident_named(view["incidents"], name)
    around = events_around(incident, list(reader.history(view["job"]["job_id"])))
    if as_json:
        write_json({**incident, "events": around})
        return
    write_table(FACT_COLUMNS, facts_of(incident))
    for title, text in blocks_of(incident):
        say(f"\n{title}:\n{text}")
    if around:
        click.echo()
    for event in around:
        _print_event(event)


def show_view(
    view: dict[str, Any],
    steps: Sequence[Mapping[str, Any]] | None = None,
    account: Mapping[str, Any] | None = None,
    *,
    verbose: bool = False,
) -> None:
    """A view (see `gyre.master.master_api`) for people; whether it learns is said with the steps that it is judged by,
    and where its prompts and tokens are with its account."""
    _show_job(view, steps, account, verbose)
    _show_vertices(view["vertices"])
    _show_evaluations(view.get("evaluations") or {})
    _show_engines(view)
    _table_of(INCIDENT_COLUMNS, view["incidents"][-SHOWN_INCIDENTS:])
    if view["job"]["error"]:
        click.echo()
        say(view["job"]["error"].rstrip())


def _show_job(
    view: dict[str, Any],
    steps: Sequence[Mapping[str, Any]] | None,
    account: Mapping[str, Any] | None,
    verbose: bool,
) -> None:
    from gyre.api.account import lines_of
    from gyre.api.terminal.formats import efficiency_words
    from gyre.api.terminal.run_end import how_to_go_on, ran_for
    from gyre.master.master_api import door_url, sessions_of
    from gyre.observe.efficiency import efficiency_of

    job, master = view["job"], view["master"]
    now = time.time()
    state = " ".join(filter(None, (str(job["phase"]), job["reason"] and f"({job['reason']})")))
    rows = [
        ("job", f"{job['name']}  {job['job_id']}"),
        ("phase", f"{state} {job['message']}".rstrip()),
        *((("to go on", more),) if (more := how_to_go_on(view)) else ()),
        ("submitted", moment(job["submitted_at"], now)),
    ]
    if job["ended_at"]:
        rows.append(("ended", moment(job["ended_at"], now)))
    rows.append(("ran for", duration(ran_for(view, now))))
    if job.get("weights_from"):
        rows.append(("weights from", job["weights_from"]))
    if not job["ended_at"]:
        answers = "answering" if master["answering"] else "not answering; from the journal"
        row = f"pid {master['pid']}, epoch {master['epoch']}, {answers}  {master['url']}"
        rows.append(("master", row.rstrip()))
    rows += _learning_rows(view, steps)
    hidden = () if verbose else DETAILS
    progress = {
        key: value
        for key, value in view["progress"].items()
        if isinstance(value, int | float | str) and not isinstance(value, bool) and key not in hidden
    }
    if not view["training"]["last"]:  # Gyre's own numbers say nothing of a trainer of the user's own
        for key, unset in (("step", 0), ("version", -1)):
            if progress.get(key) == unset:
                del progress[key]
    rows += [(LABELS.get(key, key).replace("_", " "), number(value)) for key, value in progress.items()]
    if verbose:
        rows += [(f"time of {role}", shares) for role, shares in times_of(view["progress"]).items()]
    rows += efficiency_words(efficiency_of(view, now))
    if url := door_url(view):
        rows.append(("door", url))
    if sessions := sessions_of(view):
        rows.append(("sessions", one_line(sessions["sentence"])))
    rows += _pools(view)
    discarded = view["progress"].get("tokens_discarded")
    if isinstance(discarded, dict) and discarded:
        rows.append(("tokens discarded", ", ".join(f"{number(n)} {why}" for why, n in discarded.items())))
    if account is not None and (account["prompts"]["drawn"] or account["tokens"]["generated"]):
        rows += [(f"account of {what}", line) for what, line in lines_of(account).items()]
    write_table(FACT_COLUMNS, rows)


def _learning_rows(view: dict[str, Any], steps: Sequence[Mapping[str, Any]] | None) -> list[tuple[str, str]]:
    """What the job learnt so far, what says that it does not, and what its speed depends on."""
    from gyre.api.terminal.run_end import evaluated, learnt
    from gyre.api.verdict import learns, sentence_of
    from gyre.workloads.trainer.learning.step_line import step_line

    rows = []
    last = view["training"]["last"]
    if last:
        if steps is not None:
            rows.append(("learns", sentence_of(learns(view, steps))))
        rows.append(("learnt", ", ".join(learnt(view))))
        planned = (
            0 if view["job"]["ended_at"] else view["progress"].get("steps")
        )  # in a result they are those made
        rows.append(("last step", step_line(last, steps=planned if isinstance(planned, int) else 0)))
    rows += [(f"evaluated {name}", result) for name, result in evaluated(view)]
    rows += [(f"! {warning['code'].replace('_', ' ')}", warning["message"]) for warning in view["warnings"]]
    if view["bottleneck"]:
        rows.append(("bottleneck", view["bottleneck"]))
    return rows


def _show_vertices(vertices: list[dict[str, Any]]) -> None:
    _table_of(VERTEX_COLUMNS, vertices[:SHOWN_VERTICES])
    _remark_on_more(vertices)


def _table_of(columns: Sequence[Column], items: Sequence[Mapping[str, Any]]) -> None:
    """The table below an empty line; nothing where there is no item."""
    if items:
        click.echo()
        write_table(columns, rows_of(columns, items, time.time()))


def _remark_on_more(all_of_them: Sequence[Any]) -> None:
    if (more := len(all_of_them) - SHOWN_VERTICES) > 0:
        remark(f"… and {more} more; --json has them all.")


def _if_any(key: str) -> Callable[[Mapping[str, Any], float], Any]:
    """A number, and nothing for 0."""
    return lambda item, now: item[key] or ""


def _message_of(vertex: Mapping[str, Any], now: float) -> str:
    if vertex.get("no_room"):
        waited = duration(now - vertex["no_room_since"])
        return one_line(f"waits for room for {waited}: {vertex['no_room']}")
    said, alarms = str(vertex["message"]), vertex.get("false_alarms", 0)
    if vertex.get("silent"):
        said = f"{vertex['silent']}: reports nothing for {duration(now - vertex['silent_since'])}"
    counted = f"{alarms} false alarm{'s' if alarms > 1 else ''}" if alarms else ""
    return one_line("; ".join(filter(None, (said, counted))))


VERTEX_COLUMNS = (
    Column("VERTEX", cell="id"),
    Column("PHASE", cell="phase"),
    Column("REASON", dispensable=5, cell="reason"),
    Column("PID", dispensable=3, cell=_if_any("pid")),
    Column("NODE", dispensable=6, cell=lambda vertex, now: vertex["node"][:SHOWN_NODE]),
    Column("VERSION", dispensable=4, cell="version"),
    Column("BUSY", least=8, dispensable=1, cell="busy"),
    Column("RESTARTS", dispensable=1, cell=_if_any("restarts")),
    Column("FOR", dispensable=2, cell=lambda vertex, now: duration(now - vertex["since"])),
    Column("MESSAGE", least=20, dispensable=1, cell=_message_of),
)


def _pools(view: dict[str, Any]) -> list[tuple[str, str]]:
    """A row for each pool with a price."""
    from gyre.master.master_api import pools_of_view

    rows = []
    for role, pool in pools_of_view(view).items():
        told = f"{pool.get('instances', 0)} connected, {number(pool.get('price_per_hour', 0))} an hour each"
        if (price := pool.get("price_per_million_tokens")) is not None:
            told += f", {number(price)} for a million tokens"
        rows.append((f"pool {role}", told))
    return rows


def _show_engines(view: dict[str, Any]) -> None:
    from gyre.master.master_api import engines_of
    from gyre.rollouts.plane.reported import ENGINE_COLUMNS

    engines = engines_of(view)
    ways = Column("LIMITS AND WAYS", least=32, wraps=True, cell=_limits_and_ways)
    _table_of([*map(_engine_column, ENGINE_COLUMNS), ways], engines[:SHOWN_VERTICES])
    _remark_on_more(engines)


def _engine_column(one: EngineColumn) -> Column:
    def part(engine: Mapping[str, Any], now: float) -> str:
        return f"{engine.get(one.key, 0)}/{engine.get(one.of, 0)}"

    return Column(one.title, dispensable=one.dispensable, cell=part if one.of else one.key)


def _limits_and_ways(engine: Mapping[str, Any], now: float) -> str:
    """Which limits are in force and why, and how weights come to the engine."""
    parts = [str(engine.get("limits_why") or "")]
    if engine.get("loads_why"):
        parts.append(f"weights are loaded from the disk: {engine['loads_why']}")
    if engine.get("transport"):
        codec = engine.get("codec") or "none"
        way = "links to their files" if engine["transport"] == "linked" else engine["transport"]
        way = way if codec == "none" else f"{way} as {codec}"
        why = engine.get("transfer_why")
        parts.append(f"weights come by {way}" + (f": {why}" if why else ""))
    return one_line("; ".join(part for part in parts if part))


def _show_evaluations(evaluations: dict[str, list[dict[str, Any]]]) -> None:
    """Of each held-out set the first result and the newest; an older master reports none."""
    from gyre.failover.evaluation import SHOWN

    columns = [
        Column(
            shown.title.upper(),
            dispensable=shown.dispensable,
            cell=partial(_evaluated, name, shown),
        )
        for name, shown in SHOWN.items()
        if shown.column
    ]
    _table_of(
        [Column("HELD OUT", cell="set"), Column("VERSION", cell="version"), *columns],
        [row for rows in evaluations.values() for row in [*rows[:1], *rows[1:][-SHOWN_EVALUATIONS:]]],
    )


def _evaluated(name: str, shown: Shown, row: Mapping[str, Any], now: float) -> str:
    """A number of an evaluation. Several are named; of those by k none are shown where the only k is 1, where it is
    the mean."""
    form = "{:.1%}".format if shown.form == "share" else number
    value = row.get(name)
    if isinstance(value, dict):
        parts = {key.removeprefix("reward."): one for key, one in value.items() if not key.endswith(".count")}
        return "" if set(parts) == {"1"} else " ".join(f"{key}:{form(one)}" for key, one in parts.items())
    by = f" ({row['right_by']})" if name == "accuracy" and row.get("right_by") else ""
    return "" if value is None else f"{form(value)}{by}"


def _cause(incident: Mapping[str, Any], now: float) -> str:
    """Returns the cause, with a remark if the fault lies in the job's own code and the cause does not say so."""
    own = incident["user_code"] and incident["cause"] != "user_code"
    return f"{incident['cause']} (user code)" if own else str(incident["cause"])


def _recovered_after(incident: Mapping[str, Any], now: float) -> str:
    return duration(incident["recovery_s"]) if has_recovered(incident) else ""


INCIDENT_COLUMNS = (
    Column("INCIDENT", cell="vertex"),
    Column("AT", dispensable=3, cell=lambda incident, now: moment(incident["at"], now)),
    Column("CAUSE", least=12, cell=_cause),
    Column("DECISION", least=16, dispensable=4, cell="decision"),
    Column("OUTCOME", dispensable=1, cell=lambda incident, now: came_to(incident)),
    Column("AFTER", dispensable=2, cell=_recovered_after),
    Column("MESSAGE", least=32, cell=lambda incident, now: incident_message(incident)),
)


@verb()
@click.argument("job", required=False, shell_complete=job_names)
@click.option("-f", "--follow", is_flag=True, help="Keep printing what is new until the job ends.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array; with -f one object per line.")
@click.option(
    "--after", type=click.IntRange(min=0), default=0, metavar="N", help="Print only events after number N."
)
def events(session: CliContext, job: str | None, follow: bool, as_json: bool, after: int) -> None:
    """Print a job's events, with number, time, kind and content."""
    with session.reader() as reader:
        history = reader.history(reader.find(job).job_id, after=after, follow=follow)
        if as_json and not follow:
            write_json(list(history))
            return
        for event in history:
            if as_json:
                write_json_line(event)
            else:
                _print_event(event)


def _print_event(event: Mapping[str, Any]) -> None:
    say(f"{event['seq']:>6}  {local_time(event['at'])}  {event['kind']:<20}  {_said(event)}")


def _said(event: Mapping[str, Any]) -> str:
    """Returns the body on one line: short values whole, long ones (a traceback) by their last line."""
    parts = []
    for key, value in event["body"].items():
        if value in (None, "", {}, []):
            continue
        if isinstance(value, str):
            text = value.rstrip().splitlines()[-1] if value.strip() else ""
        elif isinstance(value, dict):
            text = ",".join(f"{name}:{_short(number(item))}" for name, item in _first_things_first(value))
        else:
            text = number(value)
        parts.append(f"{key}={_short(text)}")
    return " ".join(parts)


def _first_things_first(value: dict[str, Any]) -> list[tuple[str, Any]]:
    """The entries, of a step's metrics the most important ones first: a long row is cut."""
    order = {name: index for index, name in enumerate(IMPORTANT)}
    return sorted(value.items(), key=lambda item: order.get(item[0], len(order)))


def _short(value: Any, length: int = 100) -> str:
    text = one_line(value)
    return text if len(text) <= length else text[: length - 1] + "…"


@verb()
@click.argument("job", required=False, shell_complete=job_names)
@click.option("-f", "--follow", is_flag=True, help="Keep printing what is new until the job ends.")
@click.option(
    "--role", metavar="ROLE", shell_complete=role_names, help="Print only the vertices of this role."
)
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    metavar="N",
    help="Print only the vertex with this rank in its role.",
)
@click.option("--vertex", metavar="VERTEX", help="Print only this vertex: reward-0, master-0, sink-0.")
@click.option(
    "--level",
    metavar="LEVEL",
    help="Print only lines of this level and worse: D, I, W or E (debug, information, warning, error).",
)
@click.option(
    "--since",
    metavar="TIME",
    help="Print everything from then on: so long ago (30s, 10m, 2h, 1d) or an ISO time.",
)
@click.option("--until", metavar="TIME", help="Print nothing that is newer.")
@click.option(
    "--tail", type=click.IntRange(min=0), metavar="N", help="Print only the last N lines of each vertex."
)
@click.option("--grep", metavar="REGEX", help="Print only the lines in which this is found.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print a JSON array of lines; with -f one object per line."
)
def logs(
    session: CliContext,
    job: str | None,
    follow: bool,
    role: str | None,
    rank: int | None,
    vertex: str | None,
    level: str | None,
    since: str | None,
    until: str | None,
    tail: int | None,
    grep: str | None,
    as_json: bool,
) -> None:
    """Print what a job's processes printed, in the order of time: time, level and vertex before each line.

    Without --since and --tail the newest lines.
    """
    query = _log_query(vertex, role, rank, level, since, until, grep)
    with session.reader() as reader:
        job_id = reader.find(job).job_id
        if role is not None:
            _check_role(reader, job_id, role)
        found: list[dict[str, Any]] = []
        told: set[str] = set()
        for page in reader.log_pages(job_id, query, tail=tail, follow=follow, poll_s=LOG_POLL_S):
            _remark_on(page, told, tail)
            for line in page["lines"]:
                if not as_json:
                    say(_log_line(line))
                elif follow:
                    write_json_line(line)
                else:
                    found.append(line)
        if as_json and not follow:
            write_json(found)


def _log_query(
    vertex: str | None,
    role: str | None,
    rank: int | None,
    level: str | None,
    since: str | None,
    until: str | None,
    grep: str | None,
) -> LogQuery:
    """Raises UsageError for a time, a level or an expression that is none."""
    from gyre.errors import ConfigError
    from gyre.logs.moments import moment_of
    from gyre.logs.pattern import matcher
    from gyre.logs.reading import LogQuery

    now = time.time()
    try:
        if grep:
            matcher(grep)
        return LogQuery(
            vertex=vertex,
            role=role,
            rank=rank,
            level=level[:1].upper() if level else None,
            since=moment_of(since, now, key="--since") if since else None,
            until=moment_of(until, now, key="--until") if until else None,
            grep=grep,
        )
    except ConfigError as error:
        raise click.UsageError(f"{error.message} {error.hint}".strip()) from None


def _remark_on(page: Mapping[str, Any], told: set[str], tail: int | None) -> None:
    """Say once what is not shown."""
    remarks = list(page["missing"])
    if page["searched_from"] is not None and tail is None:
        remarks.append(f"Older lines than of {local_time(page['searched_from'])} are not shown: see --since.")
    elif page["searched_from"] is not None:
        remarks.append(
            f"What is older than {local_time(page['searched_from'])} was not looked at: see --since."
        )
    for sentence in remarks:
        if sentence not in told:
            remark(sentence)
            told.add(sentence)


def _log_line(line: Mapping[str, Any]) -> str:
    at = datetime.fromtimestamp(line["at"]).isoformat(sep=" ", timespec="milliseconds")
    return f"{at} {line['level']} {line['vertex']:<12} {line['text']}"


def _check_role(reader: JobReader, job_id: str, role: str) -> None:
    """Raises NotFound for a role that the job has not."""
    from gyre.errors import NotFound, nearest

    known = {vertex["role"] for vertex in reader.view(job_id)["vertices"]}
    if known and role not in known | {"master", "sink"}:
        raise NotFound(f"Job {job_id} has no role {role!r}; {nearest(role, known)}")
