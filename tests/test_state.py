"""What a run remembers: taken apart into names and put together again, refused where it does not fit, resumed."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import DEEP, KSD, PAPER, Growing, ModelSearch, Subsets
from krylov_descent.samples.interface import Choice, SamplePolicy, Stateless
from krylov_descent.state import Parts, put_together, taken_apart, vector

F64 = torch.float64


@dataclass(frozen=True, eq=False)
class Inner:
    """Of one of several kinds, as a strategy's state is."""

    count: int = 0
    ratio: float = 1.0
    direction: Tensor | None = vector()


@dataclass(frozen=True, eq=False)
class Outer:
    """A field of each kind that there is."""

    strategy: Any
    iteration: int = 0
    size: float = 0.0
    kind: str = ""
    done: bool = False
    point: Tensor | None = vector()
    earlier: tuple[Tensor, ...] = vector(())
    sizes: tuple[int, ...] = ()
    factors: dict[str, Tensor] = field(default_factory=dict)
    table: dict[int, float] = field(default_factory=dict)
    parts: dict[str, Inner] = field(default_factory=dict)
    lists: dict[int, tuple[float, ...]] = field(default_factory=dict)
    chain: tuple[Inner, ...] = ()
    inner: Inner | None = None
    nothing: Inner | None = None


@dataclass(frozen=True)
class Odd:
    """Anything."""

    seen: object


@dataclass(frozen=True)
class Around:
    """One level more."""

    state: Odd


FRESH = Outer(Inner())
NAMED = {
    "strategy.count": 3,
    "strategy.ratio": -math.inf,
    "iteration": 2**64 - 1,
    "size": 0.1,
    "kind": "Growing",
    "done": True,
    "sizes.0": 5,
    "sizes.1": 7,
    "table.4": 0.5,
    "table.0": 2.0,
    "parts.a.count": 1,
    "parts.a.ratio": 1.0,
    "parts.b.count": 2,
    "parts.b.ratio": 1.0,
    "lists.9.0": 1.5,
    "lists.9.1": 2.5,
    "chain.0.count": 0,
    "chain.0.ratio": 1.0,
    "inner.count": 8,
    "inner.ratio": 1.0,
}


def full() -> Outer:
    v = torch.arange(3.0)
    return Outer(
        strategy=Inner(3, -math.inf, v),
        iteration=2**64 - 1,
        size=0.1,
        kind="Growing",
        done=True,
        point=v + 1,
        earlier=(v + 2, v + 3),
        sizes=(5, 7),
        factors={"0.inputs": torch.eye(2), "age": torch.tensor(0.5, dtype=F64)},
        table={4: 0.5, 0: 2.0},
        parts={"a": Inner(1), "b": Inner(2, direction=v + 4)},
        lists={9: (1.5, 2.5)},
        chain=(Inner(direction=v + 5),),
        inner=Inner(8),
    )


def test_a_state_comes_back_from_its_names() -> None:
    parts = taken_apart(full())
    assert parts.numbers == NAMED
    assert all(type(parts.numbers[name]) is type(value) for name, value in NAMED.items())
    assert [*parts.vectors] == [
        "strategy.direction", "point", "earlier.0", "earlier.1", "parts.b.direction", "chain.0.direction"
    ]  # fmt: skip
    assert [*parts.tensors] == ["factors.0.inputs", "factors.age"]
    before = {name: dict(part) for name, part in parts._asdict().items()}
    again = put_together(FRESH, parts)
    assert {name: dict(part) for name, part in parts._asdict().items()} == before  # they are left as they are
    found = taken_apart(again)
    assert found.numbers == parts.numbers
    for those, expected in ((found.vectors, parts.vectors), (found.tensors, parts.tensors)):
        assert those.keys() == expected.keys()
        assert all(those[name] is x for name, x in expected.items())
    assert isinstance(again.strategy, Inner)
    assert again.table == {4: 0.5, 0: 2.0}
    assert again.lists == {9: (1.5, 2.5)}
    assert again.parts["b"].count == 2
    assert again.nothing is None
    assert again.done is True


def test_a_fresh_state_comes_back() -> None:
    again = put_together(FRESH, taken_apart(FRESH))
    assert again.point is None
    assert (again.earlier, again.sizes, again.chain) == ((), (), ())
    assert not again.factors
    assert not again.table
    assert not again.parts
    assert again.inner is None


def test_whole_numbers_are_numbers() -> None:
    """As JSON has them."""
    parts = taken_apart(FRESH)
    again = put_together(FRESH, parts._replace(numbers={**parts.numbers, "size": 3}))
    assert (again.size, type(again.size)) == (3.0, float)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("numbers", "other"),
        ("numbers", "strategy.other"),
        ("numbers", "table.four"),
        ("numbers", "table.4.5.6"),
        ("vectors", "other"),
        ("vectors", "earlier.5"),
        ("vectors", "factors.0.inputs"),
        ("tensors", "other"),
        ("tensors", "point"),
    ],
)
def test_other_names_are_refused(part: str, name: str) -> None:
    """Also a tensor that takes the place of a vector, of which shape and dtype would be known."""
    parts = taken_apart(FRESH)
    more = parts._replace(**{part: {**getattr(parts, part), name: 1.0 if part == "numbers" else torch.zeros(3)}})
    with pytest.raises(ValueError, match=r"not that of an optimizer with these settings: it has .*Make the optimizer"):
        put_together(FRESH, more)


@dataclass(frozen=True, eq=False)
class Round:
    """One of two kinds."""

    radius: float
    kind: str = "round"


@dataclass(frozen=True, eq=False)
class Square:
    """The other."""

    side: float
    corner: Tensor
    kind: str = "square"


@dataclass(frozen=True, eq=False)
class Shapes:
    """Each item may be either."""

    shapes: dict[int, Round | Square] = field(default_factory=dict)
    one: Round | Square | None = None


def test_a_field_of_several_dataclasses_is_the_one_that_its_kind_names() -> None:
    state = Shapes({3: Round(1.0), 10: Square(2.0, torch.ones(2))}, Square(4.0, torch.zeros(1)))
    parts = taken_apart(state)
    again = put_together(Shapes(), parts)
    assert [*again.shapes] == [3, 10]
    assert isinstance(again.shapes[3], Round)
    assert isinstance(again.shapes[10], Square)
    assert isinstance(again.one, Square)
    assert again.one.side == 4.0
    assert put_together(Shapes(), taken_apart(Shapes())).one is None
    left = {name: x for name, x in parts.numbers.items() if name != "one.kind"}
    changes: list[dict[str, Any]] = [{"one.kind": "oval"}, {"one.kind": 3}, {"one.kind": "round"}]
    changes += [{"one.kind.x": "square"}, {}]
    for wrong in changes:
        with pytest.raises(ValueError, match=r"it has (no )?one\b.*Make the optimizer"):
            put_together(Shapes(), parts._replace(numbers={**left, **wrong}))


@pytest.mark.parametrize("names", [("sizes.1",), ("sizes.0", "sizes.2"), ("sizes.x",), ("sizes.-1",), ("sizes.0.0",)])
def test_a_tuple_has_no_gaps(names: tuple[str, ...]) -> None:
    parts = taken_apart(FRESH)
    with pytest.raises(ValueError, match=r"it has .*sizes.*Make the optimizer"):
        put_together(FRESH, parts._replace(numbers={**parts.numbers, **dict.fromkeys(names, 1)}))


@pytest.mark.parametrize(
    ("part", "name"), [("numbers", "point"), ("numbers", "inner"), ("vectors", "size"), ("tensors", "iteration")]
)
def test_a_number_is_no_tensor_and_a_tensor_no_number(part: str, name: str) -> None:
    parts = taken_apart(FRESH)
    without = parts._replace(numbers={key: x for key, x in parts.numbers.items() if key != name})
    value = 1.0 if part == "numbers" else torch.zeros(3)
    with pytest.raises(ValueError, match=rf"it has .*{name}.*Make the optimizer"):
        put_together(FRESH, without._replace(**{part: {**getattr(without, part), name: value}}))


@pytest.mark.parametrize("name", ["iteration", "size", "kind", "done", "strategy.count", "inner.ratio"])
def test_missing_names_are_refused(name: str) -> None:
    parts = taken_apart(full())
    fewer = {key: value for key, value in parts.numbers.items() if key != name}
    with pytest.raises(ValueError, match=rf"it has no {name}\. Make the optimizer, and the sets, as they were"):
        put_together(FRESH, parts._replace(numbers=fewer))


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("iteration", True, "whole number"),
        ("iteration", 3.0, "whole number"),
        ("iteration", -1, "whole number"),
        ("iteration", 2**64, "whole number"),
        ("iteration", "3", "whole number"),
        ("strategy.count", None, "whole number"),
        ("size", "nan", "number"),
        ("size", True, "number"),
        ("size", 10**400, "number"),
        ("done", 1, "truth value"),
        ("kind", 5, "word"),
        ("kind", "x" * 10_000, "word"),
    ],
)
def test_values_of_another_kind_are_refused(name: str, value: Any, kind: str) -> None:
    parts = taken_apart(FRESH)
    with pytest.raises(
        ValueError, match=rf"The state has {name} = .{{0,100}}, which is no {kind}.*Load another"
    ) as error:
        put_together(FRESH, parts._replace(numbers={**parts.numbers, name: value}))
    assert len(str(error.value)) < 250


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], "state.seen is a list, which cannot be saved. A strategy's state is a frozen dataclass of numbers"),
        ({1, 2}, "state.seen is a set"),
        (1j, "state.seen is a complex"),
        (print, "state.seen is a builtin"),
        ({"a": object()}, "state.seen.a is a object"),
        (({"b": [1]},), "state.seen.0.b is a list"),
        (-1, "state.seen = '-1' cannot be saved: a state has whole numbers from 0"),
        (2**64, "cannot be saved: a state has whole numbers from 0"),
        ("x" * 201, "strings of up to 200 characters"),
    ],
)
def test_what_cannot_be_saved_is_named(value: Any, message: str) -> None:
    with pytest.raises(TypeError) as error:
        taken_apart(Around(Odd(value)))
    assert message in str(error.value)


def test_annotations_that_cannot_be_read_are_told_of() -> None:
    class Elsewhere:
        pass

    @dataclass(frozen=True)
    class Local:
        seen: Elsewhere | None = None

    with pytest.raises(TypeError, match=r"Local is a state whose annotations .* 'Elsewhere' .* top of its module"):
        taken_apart(Local())


@pytest.mark.parametrize("state", [{"count": 1}, (1, 2), 5, "five", torch.ones(2)])
def test_a_strategys_state_is_a_dataclass_or_nothing(state: Any) -> None:
    """Of anything else, a fresh one would not tell what it is."""
    with pytest.raises(TypeError, match=rf"strategy is a {type(state).__name__}, which cannot be saved"):
        taken_apart(Outer(state))
    nothing = Outer(None)
    assert put_together(nothing, taken_apart(nothing)).strategy is None


class Counting(SamplePolicy):
    """A policy from outside: how often it was asked, and what it has seen, decide on the sets."""

    @dataclass(frozen=True)
    class State:
        asked: int = 0
        seen: dict[int, float] = field(default_factory=dict)

    def __init__(self, inside: Subsets) -> None:
        self.inside = inside

    def init(self) -> State:
        return self.State()

    def choose(self, iteration: int, state: Any, *, krylov_dim: int, shard: int, of_shards: int) -> Choice:
        sets = self.inside.draw(state.asked, krylov_dim=krylov_dim, shard=shard, of_shards=of_shards)
        return Choice(sets, replace(state, asked=state.asked + 1, seen={**state.seen, iteration: 0.5}))


def test_a_strategy_in_place_of_one_without_memory_begins_anew() -> None:
    """As a preconditioner does in a run that had another; what nobody takes is refused all the same."""
    assert put_together(FRESH, taken_apart(Outer(None))).strategy is FRESH.strategy
    with pytest.raises(ValueError, match=r"it has strategy\.count\. Make"):
        put_together(Outer(Stateless()), taken_apart(FRESH))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(240, 4, generator=generator)
    return x, torch.sin(x.sum(1, keepdim=True)) + 0.3 * torch.randn(240, 1, generator=generator)


def built(**settings: Any) -> tuple[nn.Module, KSD, Callable[[Any], tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        r = model(batch[0]) - batch[1]
        return r.square().mean(), r

    return model, KSD(model.parameters(), **settings), closure


def subsets() -> Subsets:
    return Subsets(data(), batch_size=60, fraction=0.05, seed=0)


RUNS: dict[str, tuple[dict[str, Any], Callable[[], SamplePolicy], int]] = {
    "paper": ({**PAPER, "krylov_dim": 4}, subsets, 6),
    "default": ({"krylov_dim": 4}, subsets, 8),
    "deep": (DEEP, lambda: Growing(data(), batch_size=60, start=40, seed=0), 60),
    "deep, all samples": (DEEP, lambda: Growing(data(), batch_size=60, start=240, seed=0), 20),
    "a policy from outside": ({"krylov_dim": 4, "search": ModelSearch()}, lambda: Counting(subsets()), 6),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumed_from_a_file_of_torch_is_the_uninterrupted_one(name: str) -> None:
    settings, policy, count = RUNS[name]
    model, optimizer, closure = built(**settings)
    sets, half, file = policy(), count // 2, io.BytesIO()
    for i in range(count):
        if i == half:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        optimizer.step(closure, sets)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, resumed, closure = built(**settings)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    sets = policy()
    reports = [resumed.step(closure, sets) for _ in range(count - half)]
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
    assert reports[-1].iteration == count - 1
    # All that a next step would see, tensors with their dtypes included.
    assert optimizer.state_dict()["krylov_descent"] == resumed.state_dict()["krylov_descent"]


def test_a_policy_of_another_kind_begins_anew_and_the_run_goes_on() -> None:
    model, optimizer, closure = built(krylov_dim=3, rollback=False)
    first = next(model.parameters())
    mine = Counting(subsets())
    for _ in range(3):
        optimizer.step(closure, mine)
    assert optimizer.state[first]["numbers"]["samples.asked"] == 3
    assert optimizer.state[first]["numbers"]["policy"] == "Counting"
    report = optimizer.step(closure, subsets())
    assert report.iteration == 3
    assert len(report.ritz_values) == 4  # the last step is in the basis
    numbers = optimizer.state[first]["numbers"]
    assert {name for name in numbers if name.startswith("samples.")} == {"samples.search_growth"}
    assert numbers["policy"] == "Subsets"
    optimizer.step(closure, mine)
    assert optimizer.state[first]["numbers"]["samples.asked"] == 1


def test_a_state_of_other_settings_is_refused_when_it_is_loaded() -> None:
    _, optimizer, closure = built(krylov_dim=3, preconditioner="kronecker")
    optimizer.step(closure, subsets())
    _, fisher, closure = built(krylov_dim=3)
    fisher.step(closure, subsets())
    before = fisher.state_dict()["krylov_descent"]
    with pytest.raises(ValueError, match=r"it has preconditioner\.\w+\. Make the optimizer"):
        fisher.load_state_dict(optimizer.state_dict())
    assert fisher.state_dict()["krylov_descent"] == before


@pytest.mark.parametrize("value", [None, -1, 2**64, [], {}, "x" * 201])
def test_what_no_policy_can_remember_is_refused_when_a_state_is_loaded(value: Any) -> None:
    _, optimizer, closure = built(krylov_dim=3)
    optimizer.step(closure, subsets())
    state, before = optimizer.whole_state(), optimizer.state_dict()["krylov_descent"]
    wrong = state._replace(numbers={**state.numbers, "samples.search_growth": value})
    with pytest.raises(ValueError, match=r"samples\.search_growth = .*, which no state has\. Load another"):
        optimizer.load_whole_state(wrong)
    assert optimizer.state_dict()["krylov_descent"] == before


@pytest.mark.parametrize("value", [0.5, True, "two"])
def test_what_this_policy_cannot_remember_is_refused_when_a_state_is_loaded(value: Any) -> None:
    _, optimizer, closure = built(krylov_dim=3)
    optimizer.step(closure, subsets())
    state, before = optimizer.whole_state(), optimizer.state_dict()["krylov_descent"]
    with pytest.raises(ValueError, match=r"samples\.search_growth = .*, which is no whole number"):
        optimizer.load_whole_state(state._replace(numbers={**state.numbers, "samples.search_growth": value}))
    assert optimizer.state_dict()["krylov_descent"] == before


@pytest.mark.parametrize("value", [0.5, True, "two"])
def test_what_a_policy_with_its_own_init_cannot_remember_is_refused_at_the_next_step(value: Any) -> None:
    model, optimizer, closure = built(krylov_dim=3)
    sets = Counting(subsets())
    optimizer.step(closure, sets)
    state = optimizer.whole_state()
    optimizer.load_whole_state(state._replace(numbers={**state.numbers, "samples.asked": value}))
    theta, before = next(model.parameters()).detach().clone(), optimizer.state_dict()["krylov_descent"]
    with pytest.raises(ValueError, match=r"samples\.asked = .*, which is no whole number"):
        optimizer.step(closure, sets)
    assert torch.equal(next(model.parameters()), theta)
    assert optimizer.state_dict()["krylov_descent"] == before


def test_any_whole_number_is_a_seed() -> None:
    """Modulo 2**64, as a state has it."""
    model, optimizer, closure = built(krylov_dim=2, seed=-1)
    same, other, same_closure = built(krylov_dim=2, seed=2**64 - 1)
    for _ in range(2):
        optimizer.step(closure, subsets())
        other.step(same_closure, subsets())
    assert optimizer.state[next(model.parameters())]["numbers"]["seed"] == 2**64 - 1
    for p, q in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(p, q)


def test_parts_without_those_of_a_name() -> None:
    parts = Parts(
        {"a": torch.zeros(1), "samples.b": torch.zeros(1)},
        {"samples": 1, "samples.c": 2},
        {"samples.d": torch.zeros(1)},
    )
    left = parts.without("samples.")
    assert (set(left.vectors), set(left.numbers), set(left.tensors)) == ({"a"}, {"samples"}, set())
