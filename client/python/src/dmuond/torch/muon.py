"""`Muon`: a torch.optim.Optimizer whose update is computed by dmuond."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuond import environment, types
from dmuond.errors import Error, InvalidArgumentError, RolledBack
from dmuond.session import Registered, Session
from dmuond.torch import collect, fsdp, options, registration, scaler, state, table
from dmuond.torch.checks import checked_number
from dmuond.torch.devices import device_of
from dmuond.torch.early import EarlySignals
from dmuond.torch.explain import explanation
from dmuond.torch.fragments import holding_of
from dmuond.torch.hand_clipping import HandClipping
from dmuond.torch.hooks import GradientHooks
from dmuond.torch.loaded_options import options_for, options_to_save
from dmuond.torch.model_hooks import LoadHook, WaitHook, buckets_of
from dmuond.torch.model_watch import ModelWatch
from dmuond.torch.presets import FIXED_OPTIONS, TORCH_OPTIONS, group_config
from dmuond.torch.reduction import Reduction
from dmuond.torch.routing import Router, RouteRules
from dmuond.torch.running_statistics import warn_of_own_statistics
from dmuond.torch.schedules import Schedules
from dmuond.torch.skips import SkippedSteps
from dmuond.torch.unread import UnreadGradients
from dmuond.torch.views import Views
from dmuond.torch.weights import Weights

_PHASES = ("collect", "decide", "update", "publish", "quiet")
_STEP_OPTIONS = ("lr", "weight_decay", "momentum", "betas", "eps")

# The newest optimizer of this process, by the id of a parameter, which it keeps.
_newest: weakref.WeakValueDictionary[int, Muon] = weakref.WeakValueDictionary()


class Muon(torch.optim.Optimizer):
    """Muon on hidden matrices, AdamW on the rest, computed by the daemon of this node.

    params: a model, an iterable of (name, parameter), or groups: dicts whose "params" is either,
        with options of their own. Pass the model where you can: names alone do not tell what holds
        a parameter, and no checkpoint that is loaded into it is seen (push_parameters() after it).
    lr: for parameters on muon. With a preset whose scale is match_rms_adamw ("dmuon",
        "moonlight") it is on AdamW's scale; Keller's 0.02 goes with preset="keller".
    groups: options of what a shell pattern of names matches, {"*.bias": {"weight_decay": 0.0}}; the
        first pattern that matches counts. A group's options come before those of the constructor,
        and each counts or is refused (docs/python.md has which reaches which parameters). Keys that
        are no option stay in the group, as in dicts.
    adamw_lr: for parameters on adamw; default lr, and required where lr is not on AdamW's scale.
    preset: "dmuon", "torch", "keller" or "moonlight" (docs/maths.md); momentum_form, nesterov,
        scale, ns_form, ns_norm, ns_eps, ns_dtype, ns_coefficients and ns_restarts override single
        fields; ns_norm="schatten4" is a tighter norm than any preset's. adjust_lr_fn (scale) and
        ns_steps (with one (a, b, c) for all) are torch's names.
    maximize: the loss goes up.
    weight_decay: decoupled; default the preset's. adamw_weight_decay: default the same.
    max_grad_norm: clips the reduced gradients by their joint norm, as clip_grad_norm_ does;
        clip_muon=False scales AdamW's alone.
    route: which parameter gets which optimizer, before the defaults: a function (name, parameter)
        -> "muon" | "adamw" | "trainer" | (route, reason) | None, or a list of (pattern, route).
    views: pattern -> RowBlocks, Heads, Experts, Flatten, "qkv", "heads:N", "experts" or "flatten".
    conv: the route of convolutions' kernels, "adamw" or "muon": as matrices with a row for each
        output channel. Where the last layer is one, it stays on adamw, as every output head does.
    include_frozen: parameters without requires_grad are registered, too, and stay as they are until
        they train: for models that are unfrozen layer by layer.
    reduction: "mean" or "sum" of the ranks' gradients, for parameters that torch has not reduced.
    broadcast: on all ranks: where ranks begin with different weights of a parameter, the lowest
        rank's go to all. Without it a fresh job fails there (WEIGHTS_DIFFER).
    mesh, mesh_roles: the DeviceMesh of all ranks, and for each of its dimensions what the ranks
        along it see: "mean", "sum", "same" or "stages" (docs/parallelism.md). For tensor parallel,
        pipelines, and shards with replicas beside them.
    data_parallel_size: what reduction="mean" divides by without a mesh, where parameters are not
        on all ranks: how many ranks have other data, their losses averaged.
    early_buckets: signal gradients during the backward pass: None when it has shown to be safe (of
        FSDP2's shards, only with max_grad_norm) and is of use (small gradients that come last are
        left to step()), True of all once it is safe, False never.
    arenas: where the daemon reads and writes: "daemon" (memory that it makes, into which parameters
        are moved), or, of parameters on a GPU, "trainer" (weights stay where they are, and
        gradients come into memory of torch's allocator; docs/python.md has what that needs).
    overlap_forward: step() returns when the step is decided, and each module waits for its own
        weights before its forward pass. For models that run module by module: weights that are
        read in other ways need wait() first.
    address, job, rank, world_size: from the environment where None (docs/python.md).
    resume: "never" | "if_present" | "require" | "discard", and on_error: "leave" | "end": as
        `dmuond.Session` has them.
    verbose: print the routing table on rank 0.

    All parameters are on the CPU or on one GPU. There nothing that is enqueued holds up the host,
    but for FSDP2's shards, whose bytes step() compares.
    Not for several threads. Raises what `dmuond.Session` raises.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        groups: Mapping[str, Mapping[str, Any]] | None = None,
        adamw_lr: float | None = None,
        preset: str = "dmuon",
        momentum: float = 0.95,
        weight_decay: float | None = None,
        adamw_weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        max_grad_norm: float | None = None,
        clip_muon: bool = True,
        route: RouteRules | None = None,
        views: Views | None = None,
        conv: str = "adamw",
        include_frozen: bool = False,
        reduction: str = "mean",
        broadcast: bool = False,
        mesh: DeviceMesh | None = None,
        mesh_roles: Mapping[str, str] | None = None,
        data_parallel_size: int | None = None,
        early_buckets: bool | None = None,
        arenas: str = "daemon",
        overlap_forward: bool = False,
        bucket_bytes: int = 0,
        address: str | None = None,
        job: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        resume: str | int | None = None,
        on_error: str = "leave",
        verbose: bool = True,
        **overrides: Any,
    ) -> None:
        checked_number("max_grad_norm", max_grad_norm or 0.0)
        if not isinstance(bucket_bytes, int) or bucket_bytes < 0:
            raise InvalidArgumentError(f"bucket_bytes={bucket_bytes!r} is no number of bytes")
        if arenas not in ("daemon", "trainer"):
            raise InvalidArgumentError(f"arenas={arenas!r} is neither 'daemon' nor 'trainer'")
        unknown = set(overrides) - {*FIXED_OPTIONS, *TORCH_OPTIONS}
        if unknown:
            raise TypeError(f"Muon() got an unexpected argument '{sorted(unknown)[0]}'")
        self.max_grad_norm = max_grad_norm
        self.clip_muon = clip_muon
        self._overlap = overlap_forward
        self._trainer_state = b""
        self._make_trainer_state: Callable[[], bytes] | None = None
        self._options = dict(
            overrides,
            lr=lr,
            adamw_lr=adamw_lr,
            preset=preset,
            momentum=momentum,
            weight_decay=weight_decay,
            adamw_weight_decay=adamw_weight_decay,
            betas=betas,
            eps=eps,
        )
        stages = isinstance(mesh_roles, Mapping) and "stages" in mesh_roles.values()
        whole = not stages and data_parallel_size is None
        given, self._left_alone = collect.groups(params, groups, whole=whole)
        self._models = collect.modules(params)
        self._router = Router(route, views, bool(include_frozen), conv)
        self._routed = self._router.route([named for group in given for named in group.members])
        registration.refuse_sparse(self._models, self._routed)
        super().__init__(
            options.split_groups(given, self._routed, self._options),
            {"lr": lr, "momentum": momentum},
        )
        rank, world_size = _place(rank, world_size)
        self._reduction = Reduction.of(reduction, data_parallel_size, mesh, mesh_roles, world_size)
        self._open = functools.partial(
            Session,
            address,
            job=job,
            rank=rank,
            world_size=world_size,
            resume=resume,
            on_error=on_error,
        )
        self._register = functools.partial(
            registration.register,
            bucket_bytes=bucket_bytes,
            broadcast=bool(broadcast),
            own_arenas=arenas == "trainer",
        )
        self._early_buckets = early_buckets
        self._begin(self._open)
        if verbose and self._session.rank == 0:
            print(self.routing_table(), file=sys.stderr)
        if world_size > 1 and not self._weights.sharded:
            warn_of_own_statistics(self._models)

    def _begin(self, open_session: Callable[..., Session]) -> None:
        """Registers the groups' parameters in a session of its own, and watches them."""
        self._schedules = Schedules(self.param_groups)
        self._registered = options.Registered(self.param_groups)
        self._show_no_state()
        if self._overlap:
            _check_overlap(self._models, self.param_groups)
        updated = {id(p): index for index, g in enumerate(self.param_groups) for p in g["params"]}
        self._frozen = [
            r.named
            for r in self._routed
            if r.route == "trainer" and not r.named.parameter.requires_grad
        ]
        updates = [r.named for r in self._routed if r.route != "trainer"]
        holdings = {
            id(named.parameter): holding_of(named.name, named.parameter) for named in updates
        }
        self._shares = shares = self._reduction.shares(self._routed)
        maximized = [id(p) for g in self.param_groups if g["maximize"] for p in g["params"]]
        for key in maximized:
            shares[key] = dataclasses.replace(shares[key], factor=-shares[key].factor)
        self._device = device_of((named.name, named.parameter) for named in updates)
        self._take_over([named.parameter for named in updates])
        self._session = open_session(device=self._device.name)
        try:
            self._slots = self._register(
                self._session,
                self._device,
                self._routed,
                updated,
                self._left_alone,
                [group_config(group) for group in self.param_groups],
                shares=shares,
                holdings=holdings,
            )
            self._weights = Weights(self._session, self._device, self._slots)
            self._weights.begin()
            self._trainer_state = self._session.trainer_state
        except BaseException:
            self._session.drop()
            raise
        session = self._session
        self._early = EarlySignals(
            self._slots,
            self._device,
            session.signal,
            lambda: session.next_attempt,
            lambda: session.last_committed_step + 1,
            allowed=self._early_buckets is not False,
            sharded=bool(self._early_buckets or self.max_grad_norm),
            last=bool(self._early_buckets),
        )
        self._watch = ModelWatch(self._slots, self._models)
        self._hand_clipping = self._watch_clipping()
        self._skips = SkippedSteps(tells=session.rank == 0)
        self._unread = UnreadGradients(s for s in self._slots if shares[id(s.parameter)].unread)
        self._slot_of = {id(slot.parameter): slot for slot in self._slots}
        self._session.on_rolled_back = _rolled_back_hook(weakref.ref(self))
        self._session.weights_unchanged = _unchanged_hook(weakref.ref(self))
        self._install_hooks()
        self._session.on_taken_over = _taken_over_hook(weakref.ref(self))
        _newest.update((id(slot.parameter), self) for slot in self._slots)

    def _take_over(self, parameters: list[Tensor]) -> None:
        """Closes the optimizers of this process that were made of the same parameters before.

        A parameter lies in the arenas of one. Where the job's state is wanted (resume=), it is the
        session that takes the place of the one before.
        """
        fresh = environment.resume(self._open.keywords["resume"]) == types.RESUME_NEVER
        job = self._open.keywords["job"] or environment.job()
        for older in {_newest.get(id(parameter)) for parameter in parameters} - {None, self}:
            if fresh or older.session.job != job:
                older.session.hand_over()

    # --- what the daemon knows ---

    @property
    def session(self) -> Session:
        return self._session

    @property
    def registered(self) -> Registered:
        """What the daemon answered to the registration: routing table, plan, balance."""
        assert self._session.registered is not None
        return self._session.registered

    @property
    def routing(self) -> tuple[types.RoutingRow, ...]:
        """Every parameter of the job: route, matrices, owners, and why."""
        return self.registered.routing

    def routing_table(self) -> str:
        """The routing as text, with the learning rate that each parameter's group has now."""
        rates = {
            name: float(group["lr"]) for group in self.param_groups for name in group["param_names"]
        }
        return table.format_table(self.routing, rates)

    def explain(self) -> str:
        """What was made of the model, as text to be read before a long run.

        Routes and their reasons, what becomes of the ranks' gradients, what this rank holds, whose
        weights it began with (of a job that goes on: whether this process came with others), and
        what of all that is a guess.
        """
        return explanation(
            self.routing_table(),
            self._routed,
            self._slots,
            self._shares,
            self._reduction,
            self._weights.origin,
        )

    @property
    def last_committed_step(self) -> int:
        """Steps that the job has behind it, skipped ones too: where the loop starts or goes on."""
        return self._session.last_committed_step

    @property
    def durable_step(self) -> int | None:
        """The newest snapshot that this rank has heard of: where a lost daemon sets the job back.

        None: a lost daemon loses the job.
        """
        return self._session.durable_step

    @property
    def last_outcome(self) -> types.Outcome | None:
        """How the last step ended: kind, gradient_norm, clip_coefficient, matrices."""
        return self._session.last_outcome

    def metrics(self) -> dict[str, float]:
        """The last step as numbers for a logger: wandb.log(opt.metrics(), opt.last_committed_step).

        step, durable_step (absent: none), committed (0: skipped), gradient_norm (before clipping),
        clip_coefficient, matrices, lr and lr/GROUP (where groups differ), and the daemon's phases
        of the last step whose weights were published, in microseconds: collect_us, decide_us,
        update_us, publish_us, quiet_us (what a step exposes). Empty before the first step.
        """
        outcome, timing = self._session.last_outcome, self._session.last_timing
        if outcome is None or timing is None:
            return {}
        found = {
            "step": outcome.step,
            "committed": outcome.kind == types.Outcome.KIND_COMMITTED,
            "gradient_norm": outcome.gradient_norm,
            "clip_coefficient": outcome.clip_coefficient,
            "matrices": outcome.matrices,
            **{f"{phase}_us": getattr(timing, f"{phase}_us") for phase in _PHASES},
        }
        if self.durable_step is not None:
            found["durable_step"] = self.durable_step
        rates = [group["lr"] for group in self.param_groups]
        found["lr"] = rates[0]
        if len(set(map(float, rates))) > 1:
            found |= {f"lr/{index}": rate for index, rate in enumerate(rates)}
        return {name: float(value) for name, value in found.items()}

    @property
    def trainer_state(self) -> bytes:
        """What commits with each step and comes back after a restart; at most 1 MiB.

        Set it before step(): position in the data, random state, scheduler (LoopState does). Or set
        a function that returns it: each step() calls it, after the closure.
        """
        return self._trainer_state

    @trainer_state.setter
    def trainer_state(self, value: bytes | Callable[[], bytes]) -> None:
        self._make_trainer_state = value if callable(value) else None
        if callable(value):
            return
        if not isinstance(value, bytes | bytearray | memoryview):
            raise InvalidArgumentError(f"trainer_state is {type(value).__name__}, not bytes")
        self._trainer_state = bytes(value)

    # --- steps ---

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step has changed nothing, because a gradient was not finite."""
        outcome = self.last_outcome
        return outcome is not None and outcome.kind == types.Outcome.KIND_SKIPPED

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler asks this, and hands itself to step() instead of unscaling by itself."""
        if "step" in vars(self):
            scaler.let_through(self.step)
        return True

    @torch.compiler.disable
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> float | None:
        """One step, on all ranks together; the weights are new when it returns.

        With overlap_forward they are when they are used, or after wait().

        Raises dmuond.RolledBack: weights and optimizer are those after its to_step, gradients are
        gone, and the loop goes on from there with its trainer_state. Aborted, DaemonLost,
        StateLost: the run ends here. InvalidArgumentError: nothing has changed and the gradients
        are still there.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._step(grad_scaler)
        except RolledBack:
            scaler.forget(grad_scaler, self)
            raise
        return loss

    def _step(self, grad_scaler: torch.amp.GradScaler | None) -> None:
        self._check_model()
        self._weights.refuse_changed_before()
        self._weights.push_loaded()
        self._session.wait_published()
        self._device.wait_for(self._early.streams)
        scale = scaler.read(grad_scaler, self)
        compared = self._early.compared()
        touched, differing = self._weights.look_at_bytes(compared, wait=False)
        self._weights.refuse_changed(touched)
        if self._hand_clipping is not None and not self.max_grad_norm:
            self._hand_clipping.before_step(scale.divided_by)
        withdraw = self._early.before_step(scale.unscaled, differing)
        # What was signalled lies in the arena, unchanged; lanes may be reading it.
        absent = self._early.adopt(withdraw)
        scalars = self._scalars(scale.loss_scale)
        if self._make_trainer_state is not None:
            self._trainer_state = self._make_trainer_state()
        self._weights.before_step()
        outcome = self._session.step(
            scalars,
            absent=absent,
            trainer_state=self._trainer_state,
            withdraw=withdraw,
            not_finite=self._unread.not_finite(absent),
            wait=not self._overlap,
            stream=self._device.stream(),
        )
        self._early.after_step()
        self._gradient_hooks.follow()
        self._watch.after_step(absent, outcome.step)
        committed = outcome.kind == types.Outcome.KIND_COMMITTED
        self._weights.after_step(committed, arrived=not self._overlap)
        scaler.write_back(grad_scaler, self, skipped=not committed)
        if self._weights.sharded and self._device.takes_turns:
            self._hold_fsdp()
        self._skips.after_step(outcome)

    def _hold_fsdp(self) -> None:
        """Lets FSDP2's streams wait for weights before anything else that is enqueued there.

        They would wait for events of the current stream, and thereby take turns with the lane that
        is awaited (docs/gpu.md). Where they are not known, the host waits.
        """
        streams = fsdp.streams(slot.parameter for slot in self._weights.sharded)
        if not streams:
            self.wait()
        # One word is enough to hold them. Weights are announced all at once, where processes take
        # turns, and what these streams do with them comes behind the current one all the same.
        buckets = [slot.bucket for slot in self._weights.sharded if slot.holding.elements]
        for stream in streams:
            self._session.wait_published(buckets[:1], stream)

    def wait(self) -> None:
        """Waits until all weights after the last step have arrived (with overlap_forward)."""
        self._session.wait_published()
        self._weights.arrived()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate; nothing is signalled before the next one outside."""
        self._early.hold()
        try:
            yield
        finally:
            self._early.release()

    def push_parameters(self, names: Iterable[str] | None = None) -> None:
        """Makes the model's weights the masters (all, or those named), after changing them by hand.

        Collective: on all ranks, between the same two steps. Where a weight of half precision is
        still its master's, rounded, the master stays. That reads and writes the masters of all
        weights that are pushed: name those that were changed, all of them.
        """
        if isinstance(names, str):
            raise InvalidArgumentError(f"names='{names}' is one name: give a list")
        chosen = None if names is None else list(names)
        unknown = set(chosen or ()) - {slot.name for slot in self._slots}
        if unknown:
            raise InvalidArgumentError(f"no parameter '{sorted(unknown)[0]}' is updated by dmuond")
        self._weights.push_keeping_masters(chosen)

    def save_snapshot(self) -> tuple[int, str]:
        """Writes a snapshot of the last committed step; its step and path, once it is durable.

        Not collective.
        """
        return self._session.save_snapshot()

    def load_snapshot(self, step: int = 0) -> int:
        """Sets the whole job back to a snapshot (0: the newest); returns its step.

        One rank calls it; the next step() of every rank raises dmuond.RolledBack.
        """
        return self._session.load_snapshot(step)

    def close(self) -> None:
        """Leaves the job; the model keeps its weights.

        Done by itself at the end of a script, of a `with` block, and when nobody refers to the
        optimizer any more (docs/python.md, "The end"). With overlap_forward it may raise
        dmuond.RolledBack, and the loop goes on from there.
        """
        try:
            self._session.close()
        finally:
            self._let_go_if_closed()

    def __enter__(self) -> Muon:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes it; after an error the job goes on as on_error says."""
        try:
            self._session.__exit__(kind, error, trace)
        finally:
            self._let_go_if_closed()

    def __del__(self) -> None:
        if "_handles" in self.__dict__:
            self._remove_hooks()

    def _let_go_if_closed(self) -> None:
        if self._session.closed:
            self._remove_hooks()
            self._make_trainer_state = None

    def __getstate__(self) -> dict[str, Any]:
        raise Error(
            "an optimizer cannot be copied or pickled: its state is the daemon's. Keep "
            "state_dict() instead"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters before the first step, with the options that groups have.

        Collective: the job is registered anew, which ends that of the constructor. Parameters of a
        model that the optimizer was made of need no names.
        """
        if not hasattr(self, "_session"):  # the constructor adds its own
            super().add_param_group(param_group)
            return
        if self._session.has_state or self._session.last_committed_step:
            raise InvalidArgumentError(
                f"the parameters are registered, and step {self._session.last_committed_step} is "
                "behind them: close() this optimizer and make one with all groups. For parameters "
                "that are frozen at first and train later, make it with include_frozen=True"
            )
        known = {id(r.named.parameter): r.named for r in self._routed}
        group, left_alone = collect.another_group(param_group, known)
        routed = self._router.route(group.members)
        models = self._models + collect.modules([param_group])
        registration.refuse_sparse(models, routed)
        for options_of_route in options.split_groups([group], routed, self._options):
            super().add_param_group(options_of_route)
        added = {id(r.named.parameter) for r in routed}
        self._routed = [r for r in self._routed if id(r.named.parameter) not in added] + routed
        self._left_alone += left_alone
        self._models = models
        self._remove_hooks()
        self._session.close()
        # The daemon waits until the last rank has left the job, which ends it.
        self._begin(functools.partial(self._open, resume="never"))

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Torch's own layout, pulled from the daemon, on the CPU. Not collective."""
        pulled = state.to_torch(self._session.pull(), self._slots)
        with torch.no_grad():
            for slot in self._slots:
                if slot.name in self._weights.loaded and "master" in pulled.get(slot.name, {}):
                    pulled[slot.name]["master"] = state.master_of(slot.parameter)
        self._schedules.apply(self.param_groups)
        try:
            for slot in self._slots:
                self.state[slot.parameter] = pulled.get(slot.name, {})
            return super().state_dict()
        finally:
            self._show_no_state()

    def _show_no_state(self) -> None:
        """Leaves the names of the state that the daemon has.

        torch's checkpoints take an empty state for that of a fresh optimizer, and go by its names.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = dict.fromkeys(state.ROUTE_KEYS[group["route"]])

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads an own state_dict, or the state (not the options) of torch.optim.Muon or AdamW.

        By names: each parameter takes its own state, and each group the options that its parameters
        had. What was saved without names goes by its order. Raises InvalidArgumentError, and
        changes nothing, where the two do not match.

        Collective: takes effect when every rank has loaded.
        """
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
            raise InvalidArgumentError(
                "the state to load has no 'state' and 'param_groups': it is no state_dict of an "
                "optimizer"
            )
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        self._weights.check_fits()
        entries = state.match(state_dict, self.param_groups, self._slot_of)
        tensors = list(state.to_daemon(entries))
        saved = state_dict["param_groups"]
        if not saved or any("route" in group for group in saved):  # torch's own have none
            self._load_options(saved)
        mastered = {
            tensor.parameter for tensor in tensors if tensor.kind == types.STATE_KIND_MASTER
        }
        self._weights.loaded -= mastered
        self._weights.push_loaded()
        if tensors:
            self._weights.push_state(tensors)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _load_options(self, saved: list[dict[str, Any]]) -> None:
        loaded = options_for(self.param_groups, saved)
        for group, found in zip(self.param_groups, loaded, strict=True):
            group.update(found)
        self._schedules.begin(self.param_groups, loaded)

    def _options_to_save(self) -> list[dict[str, Any]]:
        self._schedules.apply(self.param_groups)
        return [options_to_save(group) for group in self.param_groups]

    def _updates_of_any(self) -> int:
        """Updates that the parameter of this rank has had which has had most."""
        return max(int(t.values[0]) for t in self._session.pull(kinds=[types.STATE_KIND_STEP]))

    # --- parts ---

    def _install_hooks(self) -> None:
        self._handles: list[Any] = []
        self._modules_with: weakref.WeakKeyDictionary[nn.Module, list[str]] = (
            weakref.WeakKeyDictionary()
        )
        self._gradient_hooks = GradientHooks(self._slots, self._early)
        for slot in self._slots:
            if slot.named.module is not None:
                self._modules_with.setdefault(slot.named.module, []).append(slot.name)
        for module in (module for model in self._models for module in model.modules()):
            self._handles.append(
                module.register_load_state_dict_post_hook(LoadHook(self._on_loaded))
            )
            buckets = buckets_of(module, self._slot_of) if self._overlap else ()
            if buckets:
                hook = WaitHook(self._wait_for_buckets, buckets)
                self._handles.append(module.register_forward_pre_hook(hook))
                self._handles.append(module.register_state_dict_pre_hook(hook))

    def _watch_clipping(self) -> HandClipping | None:
        """Looks out for gradients that are clipped before the ranks' are added up."""
        trained = [slot for slot in self._slots if slot.parameter.requires_grad]
        added_up = all(
            self._shares[id(slot.parameter)].contribution == types.CONTRIBUTION_SUM
            and not isinstance(slot.parameter, DTensor)
            for slot in self._slots
        )
        if self._session.world_size == 1 or not added_up or not trained:
            return None
        return HandClipping(self._device, trained, [r.named.parameter for r in self._routed])

    def _remove_hooks(self) -> None:
        self._watch.close()
        if self._hand_clipping is not None:
            self._hand_clipping.close()
        self._gradient_hooks.remove()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _on_rolled_back(self, fresh_arenas: bool) -> None:
        """The weights of another step lie in the arenas; before step() says so to its caller."""
        with torch.no_grad():
            if fresh_arenas:
                registration.map_slots(self._session, self._device, self._slots)
            for slot in self._slots:
                slot.drop_gradient()
        self._weights.take_published()
        self._weights.loaded.clear()
        self._early.begin()
        self._gradient_hooks.follow()
        self._trainer_state = self._session.trainer_state

    def _wait_for_buckets(self, buckets: Iterable[int]) -> None:
        self._session.wait_published(buckets, self._device.stream())
        self._weights.arrived(buckets)

    def _on_loaded(self, module: nn.Module) -> None:
        self._weights.loaded.update(self._modules_with.get(module, ()))

    def _scalars(self, loss_scale: float) -> types.StepScalars:
        self._registered.check(self.param_groups)
        self._schedules.check(self.param_groups)
        self._schedules.apply(self.param_groups)
        scalars = types.StepScalars(
            loss_scale=loss_scale,
            max_grad_norm=checked_number("max_grad_norm", self.max_grad_norm or 0.0),
            clip_muon=self.clip_muon,
        )
        for index, group in enumerate(self.param_groups):
            try:
                scalars.groups.add(
                    learning_rate=float(group["lr"]),
                    weight_decay=float(group["weight_decay"]),
                    momentum=float(group["momentum"]),
                    beta1=float(group["betas"][0]),
                    beta2=float(group["betas"][1]),
                    eps=float(group["eps"]),
                )
            except (KeyError, IndexError, TypeError, ValueError) as error:
                given = {key: value for key, value in group.items() if key in _STEP_OPTIONS}
                raise InvalidArgumentError(
                    f"param_groups[{index}] is not what a step needs ({error}): {given}"
                ) from None
        return scalars

    def _check_model(self) -> None:
        self._watch.check()
        self._weights.check_fits()
        for named in self._frozen:
            if named.parameter.requires_grad and named.parameter.grad is not None:
                raise Error(
                    f"'{named.name}' was frozen when the optimizer was made and has a gradient "
                    "now: close() this optimizer and make one with include_frozen=True"
                )


def _check_overlap(models: list[nn.Module], groups: list[dict[str, Any]]) -> None:
    if not models:
        raise InvalidArgumentError("overlap_forward needs the model, not its parameters alone")
    if any(isinstance(p, DTensor) for group in groups for p in group["params"]):
        raise InvalidArgumentError(
            "overlap_forward is for replicated models: FSDP2 gathers weights before modules run"
        )
    if any(isinstance(model, torch._dynamo.OptimizedModule) for model in models):
        raise InvalidArgumentError(
            "overlap_forward waits module by module, which a model compiled as a whole does not "
            "run: make the optimizer of a plain model, or compile its blocks"
        )


def _rolled_back_hook(reference: weakref.ref[Muon]) -> Callable[[bool], None]:
    def hook(fresh_arenas: bool) -> None:
        optimizer = reference()
        if optimizer is not None:
            optimizer._on_rolled_back(fresh_arenas)

    return hook


def _taken_over_hook(reference: weakref.ref[Muon]) -> Callable[[], None]:
    def hook() -> None:
        optimizer = reference()
        if optimizer is not None:
            optimizer._remove_hooks()  # the model may be the successor's

    return hook


def _unchanged_hook(reference: weakref.ref[Muon]) -> Callable[[], bool]:
    def hook() -> bool:
        optimizer = reference()
        return optimizer is None or optimizer._weights.unchanged()

    return hook


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world: arguments, torch's process group, environment."""
    grouped = dist.is_available() and dist.is_initialized()
    if rank is None:
        rank = dist.get_rank() if grouped else environment.integer("RANK", 0)
    if world_size is None:
        world_size = dist.get_world_size() if grouped else environment.integer("WORLD_SIZE", 1)
    return rank, world_size
