"""How a step with state on local disks begins: gradients, and what must be known of all of them before any bucket.

Either of a model whose parameters are on the device, in one program, or of one that is run a layer at a time: then the
gradients go to pinned host memory, and a second program decides.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from jaxckpt.state import tree
from jaxckpt.state.mesh import replicated
from jaxckpt.state.plan import shardings
from jaxckpt.state.train_state import TrainState
from jaxckpt.update.disk_bucket import Begun, Leaves
from jaxckpt.update.host_gradients import HostGradients, Scratch, Weights
from jaxckpt.update.layer_programs import LayerGradients
from jaxckpt.update.split import Split


class Given(NamedTuple):
    """What of a state and a batch the beginning of a step reads."""

    params: Any
    model_state: Any
    step: Any
    shared: Leaves
    """the leaves of the optimizer's state that belong to no single weight"""
    read: Leaves
    """the weights that the global phase reads"""
    batch: Any


def given_of(split: Split, state: TrainState, batch: Any) -> Given:
    """Of a state, or of a plan."""
    opt_state = tree.flatten(state.opt_state)
    weights = tree.flatten(state.params if state.master is None else state.master)
    shared = {path: opt_state[path] for path, weight in split.owner.items() if weight is None}
    read = {path: weights[path] for path in split.weights if path in split.global_weights}
    return Given(state.params, state.model_state, state.step, shared, read, batch)


class Beginning(Protocol):
    microbatches: int
    """how often those of the programs run in a step that are not in `once`"""
    once: frozenset[str]
    given: Given
    """what `run` is given, abstract"""
    scratch_plan: Any
    """what `run` keeps from step to step, abstract, as for one microbatch"""
    visits: Sequence[Sequence[str]]
    """the leaves on disk, by path in the whole state, that the programs take in turn"""
    activation_bytes: int
    """of each device, kept from one of the programs to another"""

    def trace(self) -> tuple[dict[str, jax.stages.Traced], Begun]:
        """The programs by name, and what they leave, abstract."""
        ...

    def make_scratch(self) -> Any: ...

    def run(self, programs: Mapping[str, Any], given: Given, scratch: Any, weights: Weights) -> tuple[Begun, Any]:
        """Runs the programs, in any form, and uses the scratch up: (what they leave, the scratch of the next step).

        `weights` gives the leaves of `visits`."""
        ...


class OneProgram:
    """`begin(*given)` -> Begun, with the gradients on the device."""

    microbatches = 1
    once: frozenset[str] = frozenset()
    scratch_plan = ()
    visits: Sequence[Sequence[str]] = ()
    activation_bytes = 0

    def __init__(self, begin: Callable[..., Begun], plan: TrainState, given: Given) -> None:
        self._begin, self._plan, self.given = begin, plan, given

    def trace(self) -> tuple[dict[str, jax.stages.Traced], Begun]:
        plan, given = self._plan, self.given
        whole = replicated(plan.step.sharding.mesh)
        weights = plan.params if plan.master is None else plan.master
        sums = {p: shardings(x, "device") for p, x in tree.flatten(weights).items()}
        fields: list[Any] = [
            sums,
            whole,
            plan.step.sharding,
            shardings(plan.model_state),
            shardings(given.shared),
            whole,
        ]
        placed = Begun(*fields)
        jitted = jax.jit(self._begin, in_shardings=shardings(tuple(given)), out_shardings=placed, donate_argnums=(1, 2))
        return {"gradients": jitted.trace(*given)}, _with_shardings(jax.eval_shape(jitted, *given), placed)

    def make_scratch(self) -> tuple[()]:
        return ()

    def run(self, programs: Mapping[str, Any], given: Given, scratch: Any, weights: Weights) -> tuple[Begun, tuple[()]]:
        return programs["gradients"](*given), ()


class LayerByLayer:
    """The programs of `HostGradients` or `LayerGradients`, then `decide(step, shared, read, batch, sums, grads)` -> (what every bucket needs, the
    next step, the new shared leaves, metrics). It gets those gradients alone that the global phase reads."""

    once = frozenset({"norm", "global phase"})

    def __init__(
        self,
        gradients: HostGradients | LayerGradients,
        decide: Callable[..., Any],
        given: Given,
        *,
        global_grads: frozenset[str],
    ) -> None:
        self._gradients, self._decide, self.given = gradients, decide, given
        self._global_grads = sorted(global_grads)
        self.microbatches = gradients.microbatches
        self.visits, self.activation_bytes = gradients.visits, gradients.activation_bytes
        self.scratch_plan = ([gradients.number_plan], gradients.sums_plan, gradients.grads_plan)

    def trace(self) -> tuple[dict[str, jax.stages.Traced], Begun]:
        first, given = self._gradients, self.given
        whole = replicated(first.plan.step.sharding.mesh)
        arguments = (*given[2:], first.sums_plan, self._read(first.grads_plan))
        fields: list[Any] = [whole, given.step.sharding, shardings(given.shared), whole]
        jitted = jax.jit(self._decide, in_shardings=shardings(arguments), out_shardings=tuple(fields), donate_argnums=0)
        decided, step, shared, metrics = _with_shardings(jax.eval_shape(jitted, *arguments), tuple(fields))
        begun = Begun(first.grads_plan, decided, step, given.model_state, shared, metrics)
        return {**first.trace(), "global phase": jitted.trace(*arguments)}, begun

    def make_scratch(self) -> Scratch:
        return self._gradients.make_scratch()

    def run(
        self, programs: Mapping[str, Any], given: Given, scratch: Scratch, weights: Weights
    ) -> tuple[Begun, Scratch]:
        parts = (given.params, given.model_state, given.step, given.batch)
        sums, grads = self._gradients.run(programs, *parts, scratch, weights)
        decided, step, shared, metrics = programs["global phase"](*given[2:], sums, self._read(grads))
        return Begun(dict(grads), decided, step, given.model_state, shared, metrics), (*scratch[:2], grads)

    def _read(self, grads: Mapping[str, Any]) -> Leaves:
        return {path: grads[path] for path in self._global_grads}


def _with_shardings(structs: Any, placed: Any) -> Any:
    """Abstract arrays with the shardings of a tree that may end before theirs does."""
    each = jax.tree.map(
        lambda s, below: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), below),
        placed,
        structs,
    )
    return jax.tree.unflatten(jax.tree.structure(structs), jax.tree.leaves(each))
