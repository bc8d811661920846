"""The routes of a job's samples: which steps are kept, those that a filter lets through, one whole."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from gyre.api.rest import sample_schemas as schemas
from gyre.api.rest.routes import Port
from gyre.api.rest.shared_answers import SharedRoute
from gyre.config.sections.data import SET_NAME
from gyre.observe.samples.query import CONDITIONS_PATTERN, Order, SampleFilter, conditions_in

MOST_NUMBER = 2**63 - 1

samples = APIRouter(tags=["samples"], route_class=SharedRoute)

Number = Annotated[int, Field(ge=-(2**63), le=MOST_NUMBER)]
Natural = Annotated[int, Field(ge=0, le=MOST_NUMBER)]
Name = Annotated[str, Field(max_length=256)]


@samples.get("/jobs/{job:gyre_job}/samples/steps", response_model=schemas.SampleSteps)
def list_sample_steps(port: Port) -> Any:
    """The steps whose samples are kept."""
    return port.samples().steps()


@samples.get("/jobs/{job:gyre_job}/samples", response_model=schemas.SamplePage)
def list_samples(
    port: Port,
    step: Annotated[Natural | SkipJsonSchema[None], Query()] = None,
    group: Annotated[Number | SkipJsonSchema[None], Query()] = None,
    reward: Annotated[
        str,
        Query(
            max_length=200,
            description="A condition, such as `<0.2`, or several: `>=0.2,<0.4`.",
            # Said here, and checked by `conditions_in`, which says what is wrong.
            json_schema_extra={"pattern": f"^$|{CONDITIONS_PATTERN}"},
        ),
    ] = "",
    tokens: Annotated[
        str,
        Query(
            max_length=200,
            description="How many tokens the answer has: `>=1000`, or `>=100,<200`.",
            json_schema_extra={"pattern": f"^$|{CONDITIONS_PATTERN}"},
        ),
    ] = "",
    outcome: Annotated[
        Name | SkipJsonSchema[None],
        Query(description="An outcome, a finish reason, or the end of a session."),
    ] = None,
    instance: Annotated[
        Name | SkipJsonSchema[None], Query(description="An instance that generated some of its tokens.")
    ] = None,
    version: Annotated[
        Natural | SkipJsonSchema[None],
        Query(description="A policy version that generated some of its tokens."),
    ] = None,
    quarantined: Annotated[bool | SkipJsonSchema[None], Query()] = None,
    order: Order = "step",
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    offset: Annotated[int, Query(ge=0, le=10_000_000)] = 0,
) -> Any:
    """A page of the samples that have all of this. In the order `step` the newest step comes first; `worst` and `best`
    go by reward."""
    wanted = SampleFilter(
        step=step,
        group=group,
        reward=conditions_in(reward) if reward else (),
        tokens=conditions_in(tokens, "tokens") if tokens else (),
        outcome=outcome,
        instance=instance,
        version=version,
        quarantined=quarantined,
    )
    return port.samples().find(wanted, order=order, limit=limit, offset=offset)


@samples.get("/jobs/{job:gyre_job}/samples/{step}/{group}/{sample}", response_model=schemas.SampleTokens)
def show_sample(port: Port, step: Natural, group: Number, sample: Natural) -> Any:
    """One sample with all that is kept of it."""
    return port.samples().sample(step, group, sample)


@samples.get("/jobs/{job:gyre_job}/held-out", response_model=schemas.HeldOutSets)
def list_held_out_sets(port: Port) -> Any:
    """The held-out sets, and of each the versions whose answers are kept."""
    return port.samples().held_out_sets()


@samples.get("/jobs/{job:gyre_job}/held-out/{name}", response_model=schemas.HeldOutPage)
def show_held_out_answers(
    port: Port,
    name: Annotated[str, Path(max_length=64, pattern=SET_NAME.pattern)],
    version: Annotated[Natural | SkipJsonSchema[None], Query(description="By default the newest.")] = None,
    against: Annotated[
        Natural | SkipJsonSchema[None], Query(description="A version whose answers are put beside them.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    offset: Annotated[int, Query(ge=0, le=10_000_000)] = 0,
) -> Any:
    """What a version answered to the prompts of a held-out set, and what another did: those whose verdict changed come
    first."""
    return port.samples().held_out(name, version=version, against=against, limit=limit, offset=offset)
