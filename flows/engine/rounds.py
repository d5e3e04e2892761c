"""The rounds in a policy's lineage, with their order, verdicts and data; and the trigger for the next round.

A round ends with an artifact of the stage `gate`, whose inputs are the policy and the candidate. A person's `approval` of this artifact
overrides its verdict. No other state exists: the next round's number, the data already used, and whether an interrupted round must be
finished all follow from artifacts and aliases."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from puna.flows.engine.defaults import DEFAULT_RECIPE
from puna.stages.align.judgements import ALIAS
from puna.storage import Artifact, PunaError, Store

POLICY = "policy@latest"
NOTE = "rounds"  # name of the project's JSON file with the settings of automatic rounds
SETTLED = "gate@"  # prefix of the aliases that mark verdicts as carried out; the first digits of the gate's key follow


@dataclass(frozen=True)
class Round:
    """A round with a finished gate. `verdict`: passed, refused or waits; `deciding`: the gate, or a person's approval of it."""

    number: int
    gate: Artifact
    policy: Artifact
    candidate: Artifact
    deciding: Artifact

    @property
    def verdict(self) -> str:
        return str(self.deciding.manifest.metrics["verdict"])

    @property
    def mark(self) -> str:
        return f"{SETTLED}{self.gate.key[:16]}"

    def __str__(self) -> str:
        outcome = {"passed": "its candidate is the policy", "refused": "refused: the policy stays", "waits": "waits for an approval"}
        return f"round {self.number}: {outcome[self.verdict]}; {self.deciding.manifest.metrics['reason']}"


@dataclass(frozen=True)
class History:
    """The lineage of a policy. `rounds`: oldest first, with refused rounds. `policy`: None without a store. `roots`: the pretrained or
    imported models at the start of the lineage. `prompts`, `preferences` and `instructions`: the data used in any round or before round 1.
    `demonstrations`: the instructions that no model wrote."""

    policy: Artifact | None = None
    rounds: tuple[Round, ...] = ()
    roots: tuple[Artifact, ...] = ()
    prompts: tuple[Artifact, ...] = ()
    preferences: tuple[Artifact, ...] = ()
    instructions: tuple[Artifact, ...] = ()
    demonstrations: tuple[Artifact, ...] = ()

    @property
    def number(self) -> int:
        return len(self.rounds) + 1

    @classmethod
    def of(cls, store: Store, model: Artifact) -> History:
        """Return the history of `policy@latest`, else of `model`. Raise PunaError if `policy@latest` does not descend from `model`."""
        lineage = _Lineage(store)
        policy = store.alias(POLICY) if POLICY in store.aliases() else model
        rounds = lineage.rounds(policy)
        behind = lineage.ancestors([policy.key, *(one.gate.key for one in rounds)])
        if model.data_digest not in {lineage.digest[key] for key in (policy.key, *behind)}:
            remedy = f"leave the input out to go on from {POLICY}, or start with that model in its own project, --project NAME"
            raise PunaError(f"{POLICY} is {policy.id}, which does not descend from {model.id}: {remedy}")
        kinds = lineage.sources_by_kind([policy.key, *behind])
        # Instructions that a model wrote are not demonstrations, which come from people or code.
        taught = [a for a in kinds["instructions"] if any(lineage.kind[up] in ("answers", "model") for up in lineage.ancestors([a.key]))]
        return cls(
            policy, tuple(rounds), lineage.artifacts(lineage.roots(policy.key)), kinds["prompts"], kinds["preferences"],
            kinds["instructions"], tuple(a for a in kinds["instructions"] if a not in taught),
        )  # fmt: skip


class _Lineage:
    def __init__(self, store: Store) -> None:
        self._store, entries = store, store.entries()
        self.kind = {one["key"]: one["kind"] for one in entries}
        self.digest = {one["key"]: one["data_digest"] for one in entries}
        self._stage = {one["key"]: one["stage"] for one in entries}
        self._inputs = {one["key"]: [(i["name"], i["input"]) for i in one["inputs"] if i["input"] in self.kind] for one in entries}

    def artifacts(self, keys: Iterable[str]) -> tuple[Artifact, ...]:
        """Return the artifacts with these keys, one per content digest, sorted by digest."""
        one = {self.digest[key]: key for key in sorted(keys, reverse=True)}
        return tuple(self._of(one[digest]) for digest in sorted(one))

    def ancestors(self, keys: Iterable[str]) -> dict[str, None]:
        """Return the keys of all ancestors of these artifacts that are still in the store."""
        ancestors: dict[str, None] = {}
        todo = list(keys)
        while todo:
            for _, up in self._inputs[todo.pop()]:
                if up not in ancestors:
                    ancestors[up] = None
                    todo.append(up)
        return ancestors

    def roots(self, key: str) -> set[str]:
        """Return the keys of the root models of a model's lineage: models trained from no other model. The model itself may be a root."""
        roots, todo, seen = set[str](), [key], set[str]()
        while todo:
            seen.add(key := todo.pop())
            up = [one for _, one in self._inputs[key] if self.kind[one] == "model"]
            roots.update([] if up else [key])
            todo += [one for one in up if one not in seen]
        return roots

    def sources_by_kind(self, behind: Iterable[str]) -> dict[str, tuple[Artifact, ...]]:
        """Return, by kind, the data from which the artifacts `behind` (keys) were made; prompts that were only evaluated do not count."""
        data: dict[str, set[str]] = {"prompts": set(), "preferences": set(), "instructions": set()}
        for key in behind:
            for _, up in self._inputs[key]:
                kind = self.kind[up]
                if kind in data and (self.kind[key] == "model" or (kind == "prompts" and self.kind[key] not in ("prompts", "evaluation"))):
                    data[kind].add(up)
        return {kind: self.artifacts(keys) for kind, keys in data.items()}

    def rounds(self, policy: Artifact) -> list[Round]:
        gates = [(key, dict(self._inputs[key])) for key, stage in self._stage.items() if stage == "gate"]
        gates = [(key, inputs) for key, inputs in gates if {"policy", "candidate"} <= inputs.keys()]
        approvals = {up: key for key, stage in self._stage.items() if stage == "approval" for _, up in self._inputs[key]}
        chain: list[tuple[str, dict[str, str]]] = []
        digest, seen = policy.data_digest, set[str]()
        while digest not in seen:
            seen.add(digest)
            attempts = [(key, inputs) for key, inputs in gates if self.digest[inputs["policy"]] == digest]
            chain = [*(one for one in attempts if one not in chain), *chain]
            made_by = [(inputs, self._of(approvals.get(key, key))) for key, inputs in gates if self.digest[inputs["candidate"]] == digest]
            passed = [inputs for inputs, deciding in made_by if deciding.manifest.metrics.get("verdict") == "passed"]
            if passed:
                digest = self.digest[passed[-1]["policy"]]
        return [
            Round(number, self._of(key), self._of(inputs["policy"]), self._of(inputs["candidate"]), self._of(approvals.get(key, key)))
            for number, (key, inputs) in enumerate(chain, 1)
        ]

    def _of(self, key: str) -> Artifact:
        return Artifact(self.kind[key], key, self._store.files)


def rounds_of(store: Store, policy: Artifact) -> list[Round]:
    """Return the rounds that led to a policy and the later rounds that start from it, oldest first."""
    return _Lineage(store).rounds(policy)


def unsettled_round(store: Store, rounds: Iterable[Round]) -> Round | None:
    """Return the last round if its verdict has not been carried out yet, else None."""
    last = next(reversed(list(rounds)), None)
    return None if last is None or store.aliases().get(last.mark) == last.deciding.key else last


def settle(store: Store, done: Round) -> str:
    """Carry out a round's verdict and return a sentence on the outcome. A second call changes nothing. If the round passed, `policy@latest`
    and `policy@round-N` become its candidate; if the latter names another model, the sentence gives the alias used instead. A round that
    waits for a person gets an alias, so that `gc` keeps it. Raise PunaError if `policy@latest` has moved."""
    message = str(done)
    if done.verdict == "passed":
        now = store.aliases().get(POLICY, "")
        digest = Artifact("model", now, store.files).data_digest if now else done.policy.data_digest
        if digest != done.candidate.data_digest:
            if digest != done.policy.data_digest:
                raise PunaError(f"round {done.number}: {POLICY} was moved to model/{now[:12]} while it ran, and stays there")
            store.set_alias(POLICY, done.candidate, expected=now)
        name = f"policy@round-{done.number}"
        if (alias := store.set_alias(name, done.candidate)) != name:
            message += f"; {name} names another model, so this one is {alias}"
    # `gc` keeps what an alias names, so that a round may wait for a person as long as it takes.
    store.set_alias(f"waits@{done.gate.key[:16]}" if done.verdict == "waits" else done.mark, done.deciding)
    return message


@dataclass(frozen=True)
class Trigger:
    """Settings of automatic rounds. `preferences`: number of new preferences that start a round; 0: never. `recipe`: the round's recipe."""

    preferences: int = 0
    recipe: str = DEFAULT_RECIPE


def load_trigger(store: Store) -> Trigger:
    try:
        note = json.loads(store.files.read(f"{store.own(NOTE)}.json"))
        return Trigger(int(note["preferences"]), str(note["recipe"]))
    except (OSError, ValueError, KeyError, TypeError):
        return Trigger()


def save_trigger(store: Store, trigger: Trigger) -> None:
    store.files.write(f"{store.own(NOTE)}.json", json.dumps(asdict(trigger)).encode())


def human_preferences(store: Store) -> Artifact | None:
    return store.alias(ALIAS) if ALIAS in store.aliases() else None


def new_preferences(store: Store) -> int:
    """Return the number of human preferences that no round in the lineage of `policy@latest` has learned from."""
    preferences = human_preferences(store)
    if preferences is None:
        return 0
    learned: set[str] = set()
    if POLICY in store.aliases():
        for earlier in History.of(store, store.alias(POLICY)).preferences:
            learned.update(earlier.read(columns=["id"])["id"].to_pylist())
    return len(set(preferences.read(columns=["id"])["id"].to_pylist()) - learned)


def due(store: Store) -> tuple[str, Trigger] | None:
    """Return an idempotency key of the round that is due now, and the trigger; None if none is due. New judgements change the key."""
    trigger, preferences = load_trigger(store), human_preferences(store)
    if not trigger.preferences or preferences is None:
        return None
    try:
        enough = new_preferences(store) >= trigger.preferences
    except PunaError:  # the policy's lineage is incomplete, which the flow reports when it is started
        return None
    return (f"{store.own('round')}-{preferences.data_digest[:24]}-{trigger.preferences}", trigger) if enough else None
