"""The safety lines of the shipped code, how each is disabled, and the test that must notice.

mutations.py disables them, one at a time.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    name: str
    what: str  # is no longer done
    file: str
    before: str
    after: str
    target: str  # to build; empty: the Python client's, which needs none
    test: str  # command; {bin} is the folder of programs, {python} this interpreter


MUTATIONS = [
    Mutation(
        "incarnation fence",
        "a call of an older session of a rank is refused",
        "server/daemon/calls/clients.cc",
        "if (client.incarnation != key.incarnation()) {",
        "if (client.incarnation + 1000 < key.incarnation()) {",
        "session_input_test",
        "{bin}/session_input_test",
    ),
    Mutation(
        "attempt fence",
        "a submission must name the open attempt",
        "scheduler/step_member.cc",
        "if (submission.attempt != state_.open.attempt || submission.step != expected) {",
        "if (submission.step != expected) {",
        "step_simulation_test",
        "{bin}/step_simulation_test",
    ),
    Mutation(
        "exactly once",
        "a step that is submitted again gets its stored outcome",
        "scheduler/step_member.cc",
        "if (decided != nullptr &&\n",
        "if (decided != nullptr && decided->decision.verdict == Verdict::kRefuse &&\n",
        "step_simulation_test",
        "{bin}/step_simulation_test",
    ),
    Mutation(
        "one way back for a load",
        "a LoadSnapshot that is repeated gets the first one's answer",
        "server/daemon/calls/snapshot_calls.cc",
        "  if (!absl::IsCancelled(answer.status())) call->answer = answer;\n",
        "  call->told.reset();\n",
        "late_calls_test",
        "{bin}/late_calls_test",
    ),
    Mutation(
        "acknowledgement of this way back",
        "an AckRollback that is late acknowledges no later way back",
        "server/daemon/calls/attach_calls.cc",
        "if (session.must_acknowledge != acknowledged) return",
        "if (session.must_acknowledge->to_step != request.to_step()) return",
        "late_calls_test",
        "{bin}/late_calls_test",
    ),
    Mutation(
        "snapshots of other groups",
        "a job that begins from one passes its attempts: its own snapshots count as newer",
        "scheduler/job/group_job_plan.cc",
        "  PassSnapshot(out);\n",
        "",
        "step_simulation_test",
        "{bin}/step_simulation_test",
    ),
    Mutation(
        "a commit is told again",
        "members that missed it and lanes that have to finish it hear of it in a new epoch",
        "scheduler/step_coordinator.cc",
        "  if (applied_) actions.emplace_back(*applied_);\n",
        "",
        "step_simulation_test",
        "{bin}/step_simulation_test",
    ),
    Mutation(
        "end of an older trainer",
        "news of a trainer that has a successor is not heard",
        "scheduler/step_coordinator.cc",
        "  if (incarnation < incarnations_[rank]) return {};\n",
        "",
        "step_coordinator_test",
        "{bin}/step_coordinator_test",
    ),
    Mutation(
        "end of an older session",
        "the end of a session leaves its successor in the rank's place",
        "scheduler/job/group_job_ranks.cc",
        "      open->second.second > gone.incarnation()) {\n",
        "      open->second.second > gone.incarnation() + 1000) {\n",
        "group_job_test",
        "{bin}/group_job_test",
    ),
    Mutation(
        "rank of an earlier life",
        "a job starts when sessions of its own are attached, not such as a lost one has left",
        "scheduler/job/group_job_ranks.cc",
        "open->second != std::pair(from, attached.incarnation())",
        "open->second.first != from",
        "group_job_weights_test",
        "{bin}/group_job_weights_test",
    ),
    Mutation(
        "late news of a job",
        "news of a session of a job that has ended begins no other job",
        "scheduler/job/group_job_ranks.cc",
        "  if (joined != 0 && (job_ == nullptr || job_->incarnation != joined)) return {};\n",
        "  static_cast<void>(joined);\n",
        "group_job_test",
        "{bin}/group_job_test",
    ),
    Mutation(
        "the record comes first",
        "nothing is done before the job's record has it",
        "server/daemon/perform.cc",
        "  WriteRecord();\n  for (node::Action& action : actions) {\n"
        "    std::visit([this](auto& order) DMUOND_REQUIRES(mutex) { Perform(order); }, action);\n"
        "  }\n",
        "  for (node::Action& action : actions) {\n"
        "    std::visit([this](auto& order) DMUOND_REQUIRES(mutex) { Perform(order); }, action);\n"
        "  }\n"
        "  WriteRecord();\n",
        "record_test",
        "{bin}/record_test",
    ),
    Mutation(
        "a job's own messages",
        "what is said of another job changes nothing in this one",
        "scheduler/job/node_job.cc",
        "const bool concerns_it = begins_or_ends || !OfAnotherJob();",
        "const bool concerns_it = begins_or_ends || true;",
        "node_job_test",
        "{bin}/node_job_test",
    ),
    Mutation(
        "a vote without an answer",
        "a node does not leave with an older snapshot than a step that it has voted for",
        "scheduler/job/node_job_view.cc",
        "return !job_->steps.has_value() || !job_->steps->voted() ||",
        "return true || !job_->steps.has_value() || !job_->steps->voted() ||",
        "node_job_test",
        "{bin}/node_job_test",
    ),
    Mutation(
        "the node that was asked",
        "another node's newest snapshot is not what a group goes back to",
        "scheduler/job/group_job_reform.cc",
        "!finding_ || from != 0 ||",
        "!finding_ || from < 0 ||",
        "group_job_reform_test",
        "{bin}/group_job_reform_test",
    ),
    Mutation(
        "waits when a job goes back",
        "a stream's wait ends for weights that nobody publishes any more",
        "scheduler/job/node_job_reform.cc",
        "  if (job_->steps.has_value()) {\n    Do(node::MarkRollback{",
        "  if (false) {\n    Do(node::MarkRollback{",
        "node_job_test",
        "{bin}/node_job_test",
    ),
    Mutation(
        "marks of a rollback",
        "what ends a stream's wait is not taken for weights, in C++",
        "client/cpp/src/session_memory.cc",
        "if (value < attempt || wire::IsRollbackMark(value)) return",
        "if (value < attempt) return",
        "going_back_test",
        "{bin}/going_back_test",
    ),
    Mutation(
        "marks of a rollback, in Python",
        "what ends a stream's wait is not taken for weights",
        "client/python/src/dmuond/timeline.py",
        "return Published.LATE if value & 0xFFFFFFFF == _ROLLBACK_MARK else Published.YES",
        "return Published.YES",
        "",
        "{python} -m pytest -q -x tests/python/test_going_back.py",
    ),
    Mutation(
        "news of an older epoch",
        "a rank that attached before the job went back has not come back to it",
        "scheduler/job/group_job_ranks.cc",
        " || attached.epoch() < epoch_) return {};",
        ") return {};",
        "group_job_reform_test",
        "{bin}/group_job_reform_test",
    ),
    Mutation(
        "restart with lanes",
        "a job that went back restarts once, when its nodes have lanes",
        "scheduler/job/group_job_ranks.cc",
        "  if (job_->interrupted()) return {};\n",
        "",
        "group_job_reform_test",
        "{bin}/group_job_reform_test",
    ),
    Mutation(
        "flip after completion",
        "a slot becomes current only when its update is complete",
        "server/lane/updater.cc",
        "  if (!*complete) return nullptr;\n",
        "",
        "rail_test",
        "{bin}/rail_test",
    ),
    Mutation(
        "weights after submitted",
        "no byte of a weight is written before its trainer has submitted",
        "server/lane/publisher.cc",
        "if (!trainers_.IsThrough(rank, current_.attempt)) return false;",
        "if (rank < 0) return false;",
        "lane_test",
        "{bin}/lane_test",
    ),
    Mutation(
        "the dead owe no word",
        "weights are published though a trainer died before it had submitted",
        "scheduler/job/node_job_ranks.cc",
        "      command.mutable_trainer_gone()->set_rank(session.rank);\n",
        "      command.mutable_trainer_gone()->set_rank(-1);\n",
        "node_job_test",
        "{bin}/node_job_test",
    ),
    Mutation(
        "no kernel before the quiet",
        "a lane that takes turns on a GPU computes only when its trainers are through",
        "server/lane/collector.cc",
        "  if (!device_.takes_turns()) return true;\n",
        "  return true;\n",
        "lane_on_fake_cuda_test",
        "{bin}/lane_on_fake_cuda_test",
    ),
    Mutation(
        "no kernel after the first word",
        "a lane that takes turns on a GPU tells trainers of new weights when no update is left",
        "server/lane/publisher.cc",
        "    if (!device_.takes_turns()) {\n      Announce(b);\n",
        "    if (true) {\n      Announce(b);\n",
        "lane_on_fake_cuda_test",
        "{bin}/lane_on_fake_cuda_test",
    ),
    Mutation(
        "manifest after fsync",
        "a manifest is on the disk before it has its name",
        "server/storage/snapshot_store.cc",
        "  if (status.ok()) status = (*file)->Sync();\n",
        "",
        "snapshot_faults_test",
        "{bin}/snapshot_faults_test",
    ),
    Mutation(
        "state files after fsync",
        "a lane's file is on the disk before the manifest names it",
        "server/storage/safetensors_writer.cc",
        "  if (failed_ = file_->Sync(); !failed_.ok()) return failed_;\n",
        "",
        "snapshot_faults_test",
        "{bin}/snapshot_faults_test",
    ),
    Mutation(
        "directory after rename",
        "a manifest's name is on the disk before the snapshot counts",
        "server/storage/snapshot_store.cc",
        "  if (status.ok()) status = storage_->Rename(temporary, path);\n"
        "  if (status.ok()) status = storage_->SyncDirectory(directory);\n",
        "  if (status.ok()) status = storage_->Rename(temporary, path);\n",
        "snapshot_faults_test",
        "{bin}/snapshot_faults_test",
    ),
    Mutation(
        "a snapshot that hangs",
        "who waits for a snapshot is told when the directory hangs",
        "server/daemon/snapshots/snapshot_disks.cc",
        "    GiveUpWriting();\n",
        "    events_.changed();\n",
        "hanging_disk_test",
        "{bin}/hanging_disk_test --gtest_filter=*WhoWaitsForASnapshot*",
    ),
    Mutation(
        "a group without its directory",
        "a node that cannot look for a snapshot says so instead of nothing",
        "server/daemon/snapshots/snapshot_disks.cc",
        "  if (finding_.has_value()) TellNewest(Hangs(*reads_));\n",
        "",
        "hanging_disk_test",
        "{bin}/hanging_disk_test --gtest_filter=*AGroupThatLosesADaemon*",
    ),
    Mutation(
        "predecessor is gone",
        "a replacement waits until its predecessor's process has ended",
        "server/daemon/calls/session_calls.cc",
        "return left == nullptr || !Runs(core_.clients.ProcessOf(left->session));",
        "return left == nullptr || true;",
        "replacement_test",
        "{bin}/replacement_test --gtest_filter=*AStoppedTrainer*",
    ),
    Mutation(
        "stream of its own process",
        "the end of an older process's stream leaves its successor in the group",
        "scheduler/membership.cc",
        "*boot_id != member->second.info.boot_id) return {};",
        "*boot_id == 0) return {};",
        "membership_simulation_test",
        "{bin}/membership_simulation_test",
    ),
    Mutation(
        "epoch above all members'",
        "a new epoch is larger than any that a member has been in",
        "scheduler/membership.cc",
        "epoch_ = std::max(epoch_, member.info.epoch);",
        "epoch_ = std::max(epoch_, GroupEpoch(member.info.epoch.value() * 0));",
        "membership_simulation_test",
        "{bin}/membership_simulation_test",
    ),
    Mutation(
        "a finished unit stays finished",
        "a lane's successor does not apply a step twice",
        "server/lane/updater.cc",
        "if (state.step >= decision_->step) {",
        "if (state.step > decision_->step) {",
        "fault_trainer",
        "{python} tests/faults/matrix.py --victim=lane --kind=kill --point=lane.update"
        " --logs=build/mutations",
    ),
    Mutation(
        "a lost job is refused nothing",
        "a refusal of the next job of its name leaves a lost job as it is",
        "scheduler/job/node_job_plan.cc",
        "  if (job_->phase == Phase::kFailed) return;\n  Say(",
        "  Say(",
        "node_job_test",
        "{bin}/node_job_test",
    ),
    Mutation(
        "ranks are told again",
        "a node tells in a new epoch what the coordinator may have missed of its ranks",
        "scheduler/job/node_job_plan.cc",
        "  if (job_->over_old_memory || job_->goes_back) TellRanksAgain();\n",
        "",
        "step_simulation_test",
        "{bin}/step_simulation_test",
    ),
    Mutation(
        "trainer state with its step",
        "what a trainer keeps is kept before its step can be decided",
        "scheduler/job/node_job_steps.cc",
        "job_->submitted_states[session.rank] = {submission.attempt, trainer_state};\n",
        "job_->submitted_states[session.rank] = {submission.attempt, {trainer_state, 0, 0}};\n",
        "fault_trainer",
        "{python} tests/faults/matrix.py --victim=trainer --kind=kill --logs=build/mutations",
    ),
    Mutation(
        "absent gradients first",
        "lanes know what is absent before the trainer is answered",
        "scheduler/job/node_job_steps.cc",
        "const bool may_wait = submission.absent.empty() && !job_->steps->all_submitted();",
        "const bool may_wait = !job_->steps->all_submitted();",
        "step_simulation_test",
        "{bin}/step_simulation_test",
    ),
    Mutation(
        "a stranger's daemon",
        "the token is kept from a daemon of another user",
        "client/python/src/dmuond/socket_owner.py",
        "if uid not in (0, os.geteuid(), server_uid):",
        "if uid is None:",
        "",
        "{python} -m pytest -q -x tests/python/test_whose_daemon.py",
    ),
    Mutation(
        "forked children",
        "a child lets go of the session that it inherits",
        "client/python/src/dmuond/fork.py",
        "        session.leave_in_child()\n",
        "        pass\n",
        "",
        "{python} -m pytest -q -x tests/python/test_session.py -k forked",
    ),
    Mutation(
        "ways back that are not told",
        "who stands elsewhere hears that the job has gone back",
        "client/python/src/dmuond/member.py",
        "return self._stands_at == self.last_committed_step and (",
        "return self._stands_at is not None and (",
        "",
        "{python} -m pytest -q -x tests/python/test_carried_on.py",
    ),
    Mutation(
        "loads are told",
        "who stands at a snapshot hears that somebody has loaded it",
        "client/python/src/dmuond/member.py",
        "            if asked:\n                self._stands_at = None\n",
        "",
        "",
        "{python} -m pytest -q -x tests/python/test_carried_on.py",
    ),
    Mutation(
        "weights of the successor",
        "what the successor has published comes before what lay there",
        "client/python/src/dmuond/arenas.py",
        "            view[...] = values\n",
        "            pass\n",
        "",
        "{python} -m pytest -q -x tests/python/test_carried_on.py",
    ),
    Mutation(
        "calls that were cut off",
        "a call whose connection breaks is made again",
        "client/python/src/dmuond/channel.py",
        "cut = not translated.reason and (",
        "cut = translated.reason and (",
        "",
        "{python} tests/faults/matrix.py --group=1x2p --victim=coordinator --kind=cut"
        " --point=coordinator. --logs=build/mutations",
    ),
    Mutation(
        "one place in a process",
        "a session gives way to a newer one of its rank",
        "client/python/src/dmuond/places.py",
        "        older.give_way()\n",
        "",
        "",
        "{python} -m pytest -q -x tests/python/test_anew.py -k runs_twice",
    ),
    Mutation(
        "stand-in",
        "connections are read while the core is held",
        "server/daemon/calls/stand_in.h",
        "while (calls_.BusyFor(kBusy) && !stopped()) {",
        "while (calls_.BusyFor(kBusy) && !stopped() && queues_.empty()) {",
        "held_core_test",
        "{bin}/held_core_test",
    ),
    Mutation(
        "measured once",
        "a lane measures no tile that one before it has measured on its device",
        "server/lane/lane_job.cc",
        "  device.ops().UseTuning(configure.tuning());\n",
        "",
        "gpu_jobs_test",
        "{bin}/gpu_jobs_test --gtest_filter=*Measures*",
    ),
    Mutation(
        "own memory goes first",
        "a rank comes again when no lane has mapped its last process's memory",
        "scheduler/job/node_job_opening.cc",
        "if (job_ != nullptr && Unmaps(opening.rank)) return Later{NotReadyToOpen(opening.rank)};",
        "",
        "step_simulation_test",
        "{bin}/step_simulation_test",
    ),
    Mutation(
        "a group in its stream",
        "a rail asks for the end of a group that NCCL has put into the stream",
        "server/lane/nccl_group.cc",
        "if (state == NcclResult::kInProgress) break;",
        "if (state == NcclResult::kInProgress && issued_ == nullptr) break;",
        "nccl_group_test",
        "{bin}/nccl_group_test",
    ),
    Mutation(
        "stamps of a rail",
        "a lane takes nothing from a peer that has started another group",
        "server/lane/nccl_group.cc",
        "if (!stamp.has_value() || !stamp->Answers(*expected)) {",
        "if (!stamp.has_value()) {",
        "nccl_group_test",
        "{bin}/nccl_group_test",
    ),
    Mutation(
        "one member's GPU",
        "a GPU is of one member of a group",
        "scheduler/membership.cc",
        "CheckDevices(info, member.info)",
        "absl::OkStatus()",
        "membership_test",
        "{bin}/membership_test",
    ),
]


def _eps_of_presets() -> list[Mutation]:
    """Each preset's eps, ten times too large and too small: only tiny gradients show it."""
    plus = "  config.newton_schulz = JordanInBF16(NormRule::kPlusEps);\n"
    places = {
        "torch": "  config.newton_schulz = JordanInBF16(NormRule::kClampedEps);\n",
        "keller": "  config.scale = ScaleRule::kOriginal;\n" + plus,
        "moonlight": "MuonConfig MoonlightPreset() {\n  MuonConfig config;\n" + plus,
    }
    return [
        Mutation(
            f"eps of {preset} {word} 10",
            f"preset {preset} has its original's eps",
            "kernels/presets.cc",
            place,
            f"{place}  config.newton_schulz.eps = {eps};\n",
            "dmuond-lane",
            "{python} -m pytest -q tests/python/test_conformance.py -k torch_optim_muon"
            if preset == "torch"
            else "{python} -m pytest -q tests/python/test_conformance.py -k authors_publish",
        )
        for preset, place in places.items()
        for word, eps in (("times", "1e-6"), ("divided by", "1e-8"))
    ]


def _eps_of_adamw() -> list[Mutation]:
    return [
        Mutation(
            f"eps of AdamW {word} 10",
            "AdamW adds the eps that it is given",
            "kernels/cpu/adamw.cc",
            "eps(static_cast<float>(s.eps))",
            f"eps(static_cast<float>({factor} * s.eps))",
            "dmuond-lane",
            "{python} -m pytest -q tests/python/test_conformance.py -k torch_optim_adamw",
        )
        for word, factor in (("times", "10"), ("divided by", "0.1"))
    ]


MUTATIONS += _eps_of_presets() + _eps_of_adamw()
