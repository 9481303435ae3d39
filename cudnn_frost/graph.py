"""`Graph`: a `cudnn.pygraph` with the rows' plans in its list.

One `cudnn.pygraph` is wrapped and does everything it can do alone. Planning asks the rows, lets the
backend plan, and merges both into one list; from then on indices, names, filters, the build walk
and execution speak of that list. A graph that no row wants stays the wrapped graph's own business.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from typing import Any

import cudnn
from cudnn.engines import PlanConfig, decline_types, is_python_engine

from .analyzer.extract import analyze
from .analyzer.live import record_of
from .analyzer.record import GraphRecord
from .engines import Row, Verdict, row_by_id
from .engines.registry import ENABLE_VARIABLE
from .heuristics.assemble import PlanEntry, _assemble
from .heuristics.propose import infeasible, judge_and_propose
from .heuristics.report import Report
from .runtime import frontend, serdes
from .runtime.binding import Names, apply_overrides, bind_mapping, bind_ordered
from .runtime.build import build_plan
from .runtime.device import current_device, target_here
from .runtime.plan import CompiledPlan
from .runtime.prepared import CannotPrepare, PreparedLaunch, prepare
from .vocab import KNOWN_TARGETS, Target

_BackendGraph = cudnn.pygraph
_SIGNATURE = inspect.signature(_BackendGraph.__init__)

ONE_SHOT = (
    "create_execution_plans() was already called on this graph; planning is one-shot: "
    "build a new graph to re-plan, or use select_plan() to switch plans"
)


def _unsupported(message: str) -> Exception:
    return cudnn.cudnnGraphNotSupportedError(message)


class _Engine:
    """The backend's own python engine of a plan, by name, before the backend built it."""

    def __init__(self, name: str) -> None:
        self.name = name


class Graph:
    """`cudnn.pygraph` with more engines in its plan list.

    Built and used exactly as `cudnn.pygraph` (the same arguments, methods and exceptions).
    `backend` is the wrapped graph. `plans`, counts, names and indices cover the merged list:
    row plans first, the backend's behind, the reference row last. `explain()` tells why.
    """

    backend: Any

    @functools.wraps(_BackendGraph.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = _SIGNATURE.bind(None, *args, **kwargs).arguments
        self._options: dict[str, Any] = {
            k: v for k, v in bound.items() if k not in ("self", "kwargs")
        }
        self._options.update(bound.get("kwargs", {}))
        self._adopt(_BackendGraph(*args, **kwargs))

    def _adopt(self, backend: Any) -> None:
        """Wrap a fresh backend graph and forget every earlier plan."""
        self.backend = backend
        self._record: GraphRecord | None = None
        self._names: Names | None = None
        self._verdicts: tuple[Verdict, ...] = ()
        self._proposals: list[PlanEntry] = []
        # None until a row's plan is in the list: the backend answers alone
        self._entries: list[PlanEntry] | None = None
        self._compiled: dict[int, CompiledPlan] = {}
        self._overridden: dict[Any, CompiledPlan] = {}
        self._selected = 0
        self._pinned = False
        self._built = False
        self._barred_names: set[str] = set()
        self._note_filters: list[tuple[str, Any, bool]] = []
        self._workspace_limit: int | None = None
        # index -> is it barred; forgotten when a filter is added
        self._bars: dict[int, bool] = {}
        self._backend_reason = ""
        self._build_lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        if name == "backend" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.backend, name)

    def __repr__(self) -> str:
        return repr(self.backend)

    # ---- facts and verdicts

    @property
    def is_cuda_graph_replay_expected(self) -> bool:
        """The caller's statement that execute is captured into a CUDA graph and replayed."""
        return self.backend.is_cuda_graph_replay_expected

    @is_cuda_graph_replay_expected.setter
    def is_cuda_graph_replay_expected(self, value: bool) -> None:
        self.backend.is_cuda_graph_replay_expected = value

    def _read_record(self) -> GraphRecord:
        return record_of(
            self.backend,
            name=self._options.get("name", ""),
            override_shape_enabled=bool(self._options.get("is_override_shape_enabled", False)),
            replay_expected=self.backend.is_cuda_graph_replay_expected,
        )

    @property
    def _is_frozen(self) -> bool:
        """Lowered or planned: a frozen graph's ports and parameters are read-only views."""
        return any(not isinstance(node.params, dict) for node in self.backend.nodes)

    def _keep_record(self) -> None:
        """Read the declaration before lowering, which freezes it and can rewrite its strides.

        An invalid one is the backend's to reject, and no row serves one that cannot be read.
        """
        if self._record is None or not self._is_frozen:
            self._verdicts, self._proposals = (), []
            try:
                self._record = self._read_record()
            except (AttributeError, TypeError, ValueError):
                self._record = None

    @property
    def _is_judged(self) -> bool:
        """The verdicts are about what is declared now."""
        return bool(self._verdicts) and self._is_frozen

    def _take_facts(self) -> None:
        """Validate and judge the declaration before anything lowers it."""
        if self._is_judged:
            return
        if not self._is_frozen:
            # it may have changed since it was read, and validating alone can freeze it
            self._record = None
        self.backend.validate()
        self._keep_record()
        if self._record is not None:
            self._names = Names(self._record)
            self._verdicts, self._proposals = judge_and_propose(
                analyze(self._record), self._target(), os.environ
            )

    def _device(self, handle: Any = None) -> int:
        handle = handle if handle is not None else self._options.get("handle")
        return handle.device.ordinal if handle is not None else current_device()

    def _target(self) -> Target:
        """The device this graph plans for: what the constructor names, else the one at hand."""
        version = self._options.get("sm_version")
        if version is not None and (known := KNOWN_TARGETS.get(f"sm{int(version)}")):
            return known
        return target_here(self._device())

    def explain(self, target: Target | str | None = None) -> Report:
        """Every row's verdict with every reason, and the ranked list as far as it is known.

        target: another machine to ask about, a `Target` or one of `KNOWN_TARGETS`; the list then
        holds the rows' plans alone, as it does before planning: the backend is not asked.
        """
        if isinstance(target, str):
            if target not in KNOWN_TARGETS:
                raise ValueError(f"target {target!r} is unknown; known: {', '.join(KNOWN_TARGETS)}")
            target = KNOWN_TARGETS[target]
        if not isinstance(target, Target | None):
            raise TypeError(f"target: must be a Target or a name, got {type(target).__name__}")
        here = target is None
        target = target or self._target()
        if here and self._is_judged:
            answers, proposals = self._verdicts, self._proposals
        else:
            self._keep_record()
            record = self._record or self._read_record()
            answers, proposals = judge_and_propose(analyze(record), target, os.environ)
        names = [(plan.name, True) for plan in proposals]
        if here and self._is_planned and self.backend.nodes:
            count = self.get_execution_plan_count()
            ours = [e.row is not None for e in self._entries or ()] or [False] * count
            names = [(self.get_plan_name_at_index(i), ours[i]) for i in range(count)]
        reason = self._backend_reason if here else ""
        return Report(answers[0].analysis, target, answers, tuple(proposals), tuple(names), reason)

    # ---- planning

    def build_operation_graph(self) -> None:
        """Validate, and lower what the frontend cannot validate itself."""
        self._keep_record()
        self.backend.build_operation_graph()

    @property
    def _is_planned(self) -> bool:
        """A list exists, or never will: a deserialized graph has no nodes to plan."""
        return self._entries is not None or bool(self.backend.plans) or not self.backend.nodes

    def create_execution_plans(self, heuristics: list[Any] | None = None) -> None:
        """Ask every row and the backend, and rank the plans of both into one list.

        heuristics: `cudnn.heur_mode` members, None = [A, FALLBACK]. One-shot. Raises
        `cudnn.cudnnGraphNotSupportedError` naming both sides' reasons when nothing is left.
        """
        if self._entries is not None:
            raise RuntimeError(ONE_SHOT)
        if self.backend.plans:
            return self.backend.create_execution_plans(heuristics)
        self._take_facts()
        proposals = self._proposals
        try:
            self.backend.create_execution_plans(heuristics)
        except cudnn.cudnnGraphNotSupportedError as error:
            if self.backend.plans:
                raise
            self._backend_reason = str(error)
            if not proposals:
                raise _unsupported(self._no_plan_message(str(error))) from error
        if not proposals:
            return None
        modes = heuristics or [cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK]
        self._entries = _assemble(modes, lambda mode: proposals, self._backend_entries())
        return None

    def _no_plan_message(self, backend: str) -> str:
        """The backend's own message, and ours behind it when this package's rows were asked."""
        facts = [v for v in self._verdicts if v.analysis.facts is not None]
        if not facts or os.environ.get(ENABLE_VARIABLE) == "0":
            return backend
        lines = [f"{v.row.name}: {d.render()}" for v in facts for d in v.declines]
        return backend + "\ncudnn_frost rows declined:\n  " + "\n  ".join(lines)

    def _backend_entries(self) -> list[PlanEntry]:
        return [
            PlanEntry(plan.engine_id, plan.knobs, backend_index=i, mode=plan.mode)
            for i, plan in enumerate(self.backend.plans)
        ]

    def create_execution_plan(self, engine_id: int, knobs: dict[Any, int] | None = None) -> Graph:
        """Append the plan of an explicit (engine_id, knobs), a row's or the backend's.

        The pair is what `get_engine_and_knobs_at_index` reported. Raises ValueError for an id
        nobody owns or knobs the row does not have, `cudnn.cudnnGraphNotSupportedError` with the
        row's reasons when it declines this graph.
        """
        row = row_by_id(engine_id)
        if row is None:
            self._take_facts()
            before = len(self.backend.plans)
            self.backend.create_execution_plan(engine_id, knobs)
            if self._entries is not None:
                self._entries.append(PlanEntry(engine_id, knobs, backend_index=before))
            return self
        self._take_facts()
        verdict = next((v for v in self._verdicts if v.row is row), None)
        if verdict is None:
            raise _unsupported(f"{row.name} declined this graph: its declaration cannot be read")
        if not verdict.accepted:
            reasons = "; ".join(d.render() for d in verdict.declines)
            raise _unsupported(f"{row.name} declined this graph: {reasons}")
        entry = PlanEntry(engine_id, serdes.knobs_from_public(row, knobs), row)
        refusal = infeasible(row, verdict.facts, entry.knobs)
        if refusal is not None:
            raise _unsupported(f"{entry.name}: {refusal.render()}")
        frontend.freeze(self.backend)
        if self._entries is None:
            self._entries = self._backend_entries()
        self._entries.append(entry)
        return self

    def backend_plan_entries(self) -> list[Any]:
        """The backend's own plans, [] when it declined; plans the backend's side once."""
        self._keep_record()
        return self.backend.backend_plan_entries()

    @property
    def plans(self) -> list[PlanConfig]:
        """The ranked list as `cudnn.engines.PlanConfig`; indices never change."""
        if self._entries is None:
            return self.backend.plans
        backend = self.backend.plans
        return [
            PlanConfig(e.engine_id, serdes.knobs_to_public(e.knobs), mode=e.mode)
            if e.backend_index is None
            else backend[e.backend_index]
            for e in self._entries
        ]

    def get_execution_plan_count(self) -> int:
        """The length of the ranked list; 0 before planning."""
        if self._entries is None:
            return self.backend.get_execution_plan_count()
        return len(self._entries)

    def _entry(self, index: int) -> PlanEntry:
        assert self._entries is not None
        if not isinstance(index, int) or not 0 <= index < len(self._entries):
            raise IndexError(f"plan index {index} out of range for {len(self._entries)} plan(s)")
        return self._entries[index]

    def _name_of(self, entry: PlanEntry) -> str:
        if entry.backend_index is None:
            return entry.name
        return self.backend.get_plan_name_at_index(entry.backend_index)

    def get_plan_name_at_index(self, index: int) -> str:
        """A row plan's `row[KNOB=value, ...]`, or the backend's own name."""
        if self._entries is None:
            return self.backend.get_plan_name_at_index(index)
        return self._name_of(self._entry(index))

    def get_engine_and_knobs_at_index(self, index: int) -> tuple[int, dict[Any, int]]:
        """(engine_id, {cudnn.knob_type: int}): what `create_execution_plan` replays."""
        if self._entries is None:
            return self.backend.get_engine_and_knobs_at_index(index)
        entry = self._entry(index)
        if entry.backend_index is not None:
            return self.backend.get_engine_and_knobs_at_index(entry.backend_index)
        return entry.engine_id, serdes.knobs_to_public(entry.knobs)

    # ---- selection and filters

    def select_plan(self, index: int) -> Graph:
        """Pin one plan of the list; strict: if it declines to build, that is an error."""
        if self._entries is None:
            self.backend.select_plan(index)
            return self
        self._entry(index)
        self._selected, self._pinned, self._built = index, True, False
        return self

    def deselect_engines(self, engine_names: list[str]) -> Graph:
        """Bar every plan whose name contains one of these substrings; cumulative."""
        self._barred_names.update(engine_names)
        self.backend.deselect_engines(engine_names)
        return self._requalify()

    def deselect_workspace_greater_than(self, workspace_limit: int) -> Graph:
        """Bar plans that need more than `workspace_limit` bytes."""
        self._workspace_limit = workspace_limit
        self.backend.deselect_workspace_greater_than(workspace_limit)
        return self

    def deselect_behavior_notes(self, notes: list[Any]) -> Graph:
        """Bar plans that carry any of these `cudnn.behavior_note`s."""
        return self._filter_notes("behavior_notes", notes, keep=False)

    def select_behavior_notes(self, notes: list[Any]) -> Graph:
        """Bar plans that lack any of these `cudnn.behavior_note`s."""
        return self._filter_notes("behavior_notes", notes, keep=True)

    def deselect_numeric_notes(self, notes: list[Any]) -> Graph:
        """Bar plans that carry any of these `cudnn.numerical_note`s."""
        return self._filter_notes("numerical_notes", notes, keep=False)

    def select_numeric_notes(self, notes: list[Any]) -> Graph:
        """Bar plans that lack any of these `cudnn.numerical_note`s."""
        return self._filter_notes("numerical_notes", notes, keep=True)

    def _filter_notes(self, kind: str, notes: list[Any], *, keep: bool) -> Graph:
        self._note_filters += [(kind, note, keep) for note in notes]
        word = "behavior" if kind == "behavior_notes" else "numeric"
        getattr(self.backend, f"{'select' if keep else 'deselect'}_{word}_notes")(notes)
        return self._requalify()

    def _requalify(self) -> Graph:
        """A built plan that a filter now bars may not run."""
        self._bars = {}
        if self._entries is not None and self._built and self._is_barred(self._selected):
            self._built = False
        return self

    def _is_barred(self, index: int) -> bool:
        barred = self._bars.get(index)
        if barred is None:
            barred = self._bars[index] = self._find_bar(self._entry(index))
        return barred

    def _find_bar(self, entry: PlanEntry) -> bool:
        name = self._name_of(entry)
        if any(part in name for part in self._barred_names):
            return True
        if entry.row is None:
            # numeric notes of a backend plan have no reader: building it applies that filter
            filters = [f for f in self._note_filters if f[0] == "behavior_notes"]
            notes = self._backend_notes(entry) if filters else []
        else:
            filters, notes = self._note_filters, []
        for kind, note, keep in filters:
            carried = notes if entry.row is None else _notes(entry.row, kind)
            if (note in carried) != keep:
                return True
        return False

    def _backend_notes(self, entry: PlanEntry) -> list[Any]:
        return self.backend.get_behavior_notes_for_plan_at_index(entry.backend_index)

    def _reject_if_barred(self, index: int) -> None:
        if self._is_barred(index):
            name = self.get_plan_name_at_index(index)
            raise ValueError(
                f"plan {index} ({name!r}) is excluded by deselect_engines()/a note filter"
            )

    def get_behavior_notes_for_plan_at_index(self, index: int, *args: Any, **kwargs: Any) -> list:
        """The `cudnn.behavior_note`s of one plan."""
        if self._entries is None:
            return self.backend.get_behavior_notes_for_plan_at_index(index, *args, **kwargs)
        entry = self._entry(index)
        if entry.row is not None:
            return _notes(entry.row, "behavior_notes")
        return self._backend_notes(entry)

    def get_behavior_notes(self, *args: Any, **kwargs: Any) -> list:
        """The `cudnn.behavior_note`s of the selected plan."""
        if self._entries is None:
            return self.backend.get_behavior_notes(*args, **kwargs)
        return self.get_behavior_notes_for_plan_at_index(self._selected)

    @property
    def _plan_index(self) -> int:
        """The selected index, under the name that the frontend's own helpers read it by."""
        return self.backend._plan_index if self._entries is None else self._selected

    @property
    def selected_engine(self) -> Any:
        """The row (with `.name`) serving the selected plan, None for the cuDNN backend."""
        if self._entries is None:
            return self.backend.selected_engine
        entry = self._entries[self._selected]
        if entry.row is not None:
            return entry.row
        if is_python_engine(entry.engine_id):
            return _Engine(self._name_of(entry).split("[")[0])
        return None

    # ---- building

    def check_support(self) -> None:
        """A row's plan was checked while planning; a backend plan asks the backend.

        Its decline is final only when it is pinned or no row's plan is in the list.
        """
        if self._entries is None:
            self._keep_record()
            return self.backend.check_support()
        if self._entries[self._selected].row is None:
            try:
                self.backend.check_support()
            except decline_types():
                if self._pinned or all(e.row is None for e in self._entries):
                    raise
        return None

    def build(self, heuristics: list[Any] | None = None, ctx: Any = None) -> None:
        """validate, plan (once), check support and build the first plan that builds."""
        self.backend.validate()
        self.build_operation_graph()
        if not self._is_planned:
            self.create_execution_plans(heuristics)
        self.check_support()
        self.build_plans(ctx=ctx)

    def build_plans(self, *args: Any, ctx: Any = None, **kwargs: Any) -> None:
        """Walk the list from the selected plan and keep the first that builds.

        policy: `cudnn.build_plan_policy`; ALL builds every plan that is not barred and keeps the
        selected one. A decline (NotImplementedError, cudnnGraphNotSupportedError, ImportError)
        moves on and is kept for the message; any other error propagates.
        """
        if not self._is_planned:
            self.create_execution_plans()
        if self._entries is None:
            return self.backend.build_plans(*args, ctx=ctx, **kwargs)
        everything = cudnn.build_plan_policy.ALL in (*args, kwargs.get("policy"))
        self._built = False
        start = self._selected
        built, failures = self._walk(start, everything)
        if built is None:
            reasons = "\n  ".join(failures or ["every plan is excluded by a filter"])
            if self._backend_reason:
                reasons += f"\n  the backend declined: {self._backend_reason}"
            raise _unsupported(f"no plan in the list could be built:\n  {reasons}")
        if everything and self._entries[built].row is None:
            # each backend build changes its current plan: make it the kept one again
            self._build_at(built)
        self._selected, self._built = built, True
        return None

    def _walk(self, start: int, everything: bool) -> tuple[int | None, list[str]]:
        """(index to keep, reasons of the plans that declined on the way)."""
        kept, failures = None, []
        for index in range(0 if everything else start, self.get_execution_plan_count()):
            strict = self._pinned and index == start
            if self._is_barred(index):
                if strict:
                    name = self.get_plan_name_at_index(index)
                    raise ValueError(
                        f"plan {index} ({name!r}) is pinned by select_plan() but excluded by "
                        "deselect_engines() or a note filter; drop one of the two instructions"
                    )
                continue
            try:
                self._build_at(index)
            except decline_types() as error:
                if strict:
                    raise
                failures.append(f"[{index}] {self.get_plan_name_at_index(index)}: {error}")
                continue
            if not everything:
                return index, failures
            if kept is None or index == start:
                kept = index
        return kept, failures

    def _build_at(self, index: int, handle: Any = None) -> CompiledPlan | None:
        """Build one plan; a row's plan is built once and kept. None for a backend plan."""
        entry = self._entry(index)
        if entry.row is None:
            self.backend.build_plan_at_index(entry.backend_index)
            return None
        plan = self._compiled.get(index)
        if plan is None:
            with self._build_lock:
                plan = self._compiled.get(index)
                if plan is None:
                    plan = build_plan(entry, self._facts(), self._target(), self._device(handle))
                    self._compiled[index] = plan
        limit = self._workspace_limit
        if limit is not None and plan.workspace_bytes > limit:
            raise _unsupported(
                f"needs {plan.workspace_bytes} workspace bytes, the limit is {limit}"
            )
        return plan

    def _facts(self) -> Any:
        return self._verdicts[0].analysis.facts

    def build_plan_at_index(self, index: int) -> Graph:
        """Build one plan of the list and select it."""
        if self._entries is None:
            self.backend.build_plan_at_index(index)
            return self
        self._entry(index)
        self._reject_if_barred(index)
        self._build_at(index)
        self._selected, self._built = index, True
        return self

    def get_workspace_size(
        self,
        handle: Any = None,
        override_uids: Any = None,
        override_shapes: Any = None,
        override_strides: Any = None,
    ) -> int:
        """Workspace bytes of the built plan; RuntimeError before build()."""
        overrides = (override_uids, override_shapes, override_strides)
        if self._entries is None:
            return self.backend.get_workspace_size(handle, *overrides)
        if not self._built:
            raise RuntimeError("Call build() first")
        return self._workspace_at(self._selected, handle, overrides)

    def get_workspace_size_plan_at_index(
        self,
        index: int,
        handle: Any = None,
        override_uids: Any = None,
        override_shapes: Any = None,
        override_strides: Any = None,
    ) -> int:
        """Workspace bytes of one plan; a row's plan is built for the answer."""
        overrides = (override_uids, override_shapes, override_strides)
        if self._entries is None:
            return self.backend.get_workspace_size_plan_at_index(index, handle, *overrides)
        self._entry(index)
        self._reject_if_barred(index)
        return self._workspace_at(index, handle, overrides)

    def _workspace_at(self, index: int, handle: Any, overrides: tuple[Any, Any, Any]) -> int:
        entry = self._entry(index)
        if entry.row is None:
            return self.backend.get_workspace_size_plan_at_index(
                entry.backend_index, handle, *overrides
            )
        plan = self._build_at(index, handle)
        assert plan is not None
        return self._override(index, plan, *overrides).workspace_bytes

    # ---- execution

    def execute(
        self,
        tensor_dict: Any,
        workspace: Any = None,
        handle: Any = None,
        override_uids: Any = None,
        override_shapes: Any = None,
        override_strides: Any = None,
        tensor_uids: Any = None,
    ) -> None:
        """Run the selected plan on the handle's stream; builds first when needed.

        tensor_dict: mapping from tensor, name or uid to buffer, or with `tensor_uids` the buffers
        in that order. workspace: at least `get_workspace_size()` bytes. Overrides replace declared
        extents and strides for this call, or raise before anything is launched.
        """
        if self._entries is None:
            if not self._is_planned:
                self.build()
            if self._entries is None:
                return self.backend.execute(
                    tensor_dict,
                    workspace,
                    handle,
                    override_uids,
                    override_shapes,
                    override_strides,
                    tensor_uids,
                )
        if not self._built:
            self.build()
        overrides = (override_uids, override_shapes, override_strides)
        return self._run(self._selected, tensor_dict, workspace, handle, overrides, tensor_uids)

    def execute_plan_at_index(
        self,
        tensor_dict: Any,
        workspace: Any = None,
        index: int = 0,
        handle: Any = None,
        override_uids: Any = None,
        override_shapes: Any = None,
        override_strides: Any = None,
        *,
        tensor_uids: Any = None,
    ) -> None:
        """Run one plan of the list; the selection stays where it is."""
        overrides = (override_uids, override_shapes, override_strides)
        if self._entries is None:
            return self.backend.execute_plan_at_index(
                tensor_dict, workspace, index, handle, *overrides, tensor_uids=tensor_uids
            )
        self._entry(index)
        self._reject_if_barred(index)
        return self._run(index, tensor_dict, workspace, handle, overrides, tensor_uids)

    def prepare(self, index: int | None = None) -> PreparedLaunch:
        """A plan as a launch from bare addresses, for callers in C++ or in a hurry.

        index: of the list; default the selected plan. It is built first when it is not.
        Raises cudnnGraphNotSupportedError for a backend plan or the reference row's, which have no
        launch without Python.
        """
        if index is None and not self._built:
            self.build()
        index = self._plan_index if index is None else index
        if self._entries is None:
            raise _unsupported("no row's plan is in the list: there is nothing to prepare")
        entry = self._entry(index)
        self._reject_if_barred(index)
        plan = self._build_at(index)
        try:
            if plan is None:
                raise CannotPrepare("the cuDNN backend launches it")
            return prepare(plan)
        except CannotPrepare as error:
            raise _unsupported(f"{self._name_of(entry)} cannot be prepared: {error}") from None

    def _run(
        self,
        index: int,
        pack: Any,
        workspace: Any,
        handle: Any,
        overrides: tuple[Any, Any, Any],
        tensor_uids: Any,
    ) -> None:
        assert self._entries is not None
        entry = self._entries[index]
        if entry.row is None:
            return self.backend.execute_plan_at_index(
                pack, workspace, entry.backend_index, handle, *overrides, tensor_uids=tensor_uids
            )
        plan = self._compiled.get(index) or self._build_at(index, handle)
        assert plan is not None and self._names is not None
        if overrides != (None, None, None):
            plan = self._override(index, plan, *overrides)
        auto = frontend.auto_bound(self.backend)
        if tensor_uids is None:
            bound = bind_mapping(pack, self._names, auto)
        else:
            bound = bind_ordered(pack, tensor_uids, auto)
        handle = handle if handle is not None else self._options.get("handle")
        stream = cudnn.get_stream(handle) if handle is not None else None
        plan.execute(bound, workspace, stream)
        return None

    def _override(
        self,
        index: int,
        plan: CompiledPlan,
        override_uids: Any = None,
        override_shapes: Any = None,
        override_strides: Any = None,
    ) -> CompiledPlan:
        """The plan for other extents, out of the same compiled artifact; ValueError if refused."""
        if override_uids is None and override_shapes is None and override_strides is None:
            return plan
        key = (index, repr((override_uids, override_shapes, override_strides)))
        found = self._overridden.get(key)
        if found is not None:
            return found
        assert self._record is not None
        entry = self._entry(index)
        record = apply_overrides(
            self._record, override_uids or (), override_shapes, override_strides
        )
        answers, _ = judge_and_propose(analyze(record), self._target(), os.environ)
        verdict = next(v for v in answers if v.row is entry.row)
        if not verdict.accepted:
            reasons = "; ".join(d.render() for d in verdict.declines)
            raise ValueError(f"{entry.name} cannot run with these overrides: {reasons}")
        found = build_plan(entry, verdict.facts, self._target(), self._device())
        if found.key != plan.key:
            raise ValueError(f"{entry.name} cannot run with these overrides: it needs other code")
        self._overridden[key] = found
        return found

    def populate_cuda_graph(
        self, handle: Any, variant_pack: Any, workspace: Any, cuda_graph: Any
    ) -> Any:
        """Record a backend plan into a CUDA graph; a row's plan is captured from its stream."""
        self._refuse_native_capture("populate_cuda_graph")
        return self.backend.populate_cuda_graph(handle, variant_pack, workspace, cuda_graph)

    def update_cuda_graph(
        self, handle: Any, variant_pack: Any, workspace: Any, cuda_graph: Any
    ) -> Any:
        """Update a backend plan's CUDA graph; as `populate_cuda_graph`."""
        self._refuse_native_capture("update_cuda_graph")
        return self.backend.update_cuda_graph(handle, variant_pack, workspace, cuda_graph)

    def _refuse_native_capture(self, method: str) -> None:
        if self._entries is not None and (row := self._entries[self._selected].row):
            raise _unsupported(
                f"{method}() records a cuDNN backend plan; the selected plan is {row.name}'s: "
                "capture execute() on its stream instead"
            )

    # ---- persistence

    def key(self, *args: Any, **kwargs: Any) -> int:
        """The backend's cache key; blind to which row serves."""
        self._keep_record()
        return self.backend.key(*args, **kwargs)

    def serialize(self, *, as_bytes: bool = False, include_kernels: bool = True) -> Any:
        """The built plan as bytes: the backend's format, or declaration + engine id + knobs."""
        if self._entries is None or self._entries[self._selected].row is None:
            return self.backend.serialize(as_bytes=as_bytes, include_kernels=include_kernels)
        if not self._built:
            raise RuntimeError("serialize(): build the selected plan first (build_plans())")
        assert self._record is not None
        blob = serdes.dump(self._record, self._options, self._entries[self._selected])
        return blob if as_bytes else list(blob)

    def deserialize(self, *args: Any, **kwargs: Any) -> None:
        """Load what `serialize` wrote into an empty graph; a row's plan is rebuilt.

        Raises ValueError for a damaged or foreign blob, RuntimeError when this graph has nodes,
        and the row's decline when this machine cannot serve it. A failed load changes nothing.
        """
        values = (*args, *kwargs.values())
        blob = next((v for v in values if serdes.is_row_plan(v)), None)
        if blob is None:
            return self.backend.deserialize(*args, **kwargs)
        if self.backend.nodes:
            raise RuntimeError("deserialize() loads into an empty graph; this one has nodes")
        record, options, engine_id, knobs = serdes.load(blob)
        handle = next((v for v in values if isinstance(v, cudnn.Handle)), None)
        options["handle"] = handle if handle is not None else self._options.get("handle")
        loaded = Graph(**options)
        serdes.declare(record, loaded.backend)
        loaded.create_execution_plan(engine_id, knobs)
        loaded.select_plan(0)
        loaded.build_plans()
        self.__dict__.update(loaded.__dict__)
        return None


def _notes(row: Row, kind: str) -> list[Any]:
    enum = cudnn.behavior_note if kind == "behavior_notes" else cudnn.numerical_note
    return [getattr(enum, name) for name in getattr(row, kind)]


def _forwarder(name: str, member: Any) -> Any:
    if isinstance(member, property):
        return property(lambda self: getattr(self.backend, name), doc=member.__doc__)

    @functools.wraps(member)
    def forward(self: Graph, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.backend, name)(*args, **kwargs)

    return forward


def _complete_surface() -> None:
    """Give the class every public name of the wrapped one, for callers that look on the class."""
    for name, member in inspect.getmembers(_BackendGraph):
        forwardable = callable(member) or isinstance(member, property)
        if forwardable and not name.startswith("_") and name not in vars(Graph):
            setattr(Graph, name, _forwarder(name, member))


_complete_surface()


def install() -> None:
    """Put `Graph` in the place of `cudnn.pygraph`, for code that builds graphs by that name."""
    cudnn.pygraph = Graph


def uninstall() -> None:
    """Undo `install()`."""
    cudnn.pygraph = _BackendGraph
