#include "server/daemon/calls/sample_calls.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "base/unique_fd.h"
#include "kernels/cpu/cpu_memory.h"
#include "kernels/orthogonality.h"
#include "server/common/errors.h"
#include "server/daemon/calls/admin_calls.h"
#include "server/daemon/node_view.h"

namespace dmuond::server {
namespace {

using std::chrono::steady_clock;

constexpr int32_t kMatricesMax = 100;
constexpr int64_t kTimeoutMaxMs = 600'000;

// O of after = keep * before - rate * O, into the place of `before`, and its sum of squares.
double Direction(const v1::LaneReport::UpdateCopied& copied, float* before, const float* after,
                 int64_t elements) {
  const auto keep = static_cast<float>(copied.keep());
  double squares = 0;
  for (int64_t i = 0; i < elements; ++i) {
    const double o = (static_cast<double>(before[i] * keep) - after[i]) / copied.rate();
    before[i] = static_cast<float>(o);
    squares += o * o;
  }
  return squares;
}

double MicrosecondsSince(steady_clock::time_point began) {
  return std::chrono::duration<double, std::micro>(steady_clock::now() - began).count();
}

}  // namespace

absl::StatusOr<v1::SampleUpdatesReply> SampleCalls::SampleUpdates(
    const v1::SampleUpdatesRequest& request, const Core::Cancelled& cancelled) {
  const bool named = !request.parameters().empty();
  if ((!named && (request.matrices() < 1 || request.matrices() > kMatricesMax)) ||
      request.timeout_ms() < 1 || request.timeout_ms() > kTimeoutMaxMs) {
    return Error(absl::StatusCode::kInvalidArgument, "SAMPLE_INVALID",
                 Say(Named("matrices", request.matrices()), " matrices within ",
                     Named("timeout_ms", request.timeout_ms()), " ms: 1 to ", kMatricesMax,
                     " of them, within 1 to ", kTimeoutMaxMs, " ms"));
  }
  const auto deadline = steady_clock::now() + std::chrono::milliseconds(request.timeout_ms());
  const Core::Seen seen = core_.Look();
  const scheduler::PlannedJob& planned = seen.view->planned;
  if (planned.plan == nullptr) return NoPlan();
  absl::StatusOr<std::vector<scheduler::UnitId>> chosen = Chosen(request, planned);
  if (!chosen.ok()) return chosen.status();
  v1::SampleUpdatesReply reply;
  for (const scheduler::UnitId id : *chosen) {
    absl::StatusOr<v1::SampleUpdatesReply::Row> row = Sample(id, planned.plan, deadline, cancelled);
    if (absl::IsDeadlineExceeded(row.status()) && reply.rows_size() > 0) break;
    if (!row.ok()) return row.status();
    const scheduler::Unit& unit = planned.plan->units[id.value()];
    row->set_parameter(planned.inputs->layout.parameters[unit.parameter].name);
    *reply.add_rows() = *std::move(row);
  }
  return reply;
}

absl::StatusOr<std::vector<scheduler::UnitId>> SampleCalls::Chosen(
    const v1::SampleUpdatesRequest& request, const scheduler::PlannedJob& planned) const {
  std::vector<scheduler::UnitId> here;
  for (const scheduler::Unit& unit : planned.plan->units) {
    if (unit.kind != scheduler::UnitKind::kMatrix) continue;
    if (core_.NodeOf(unit.owner) == core_.options.node) here.push_back(unit.id);
  }
  std::vector<scheduler::UnitId> chosen;
  for (const std::string& name : request.parameters()) {
    const size_t before = chosen.size();
    for (const scheduler::UnitId id : here) {
      const int32_t parameter = planned.plan->units[id.value()].parameter;
      if (planned.inputs->layout.parameters[parameter].name == name) chosen.push_back(id);
    }
    if (chosen.size() > before) continue;
    return Error(absl::StatusCode::kInvalidArgument, "SAMPLE_INVALID",
                 Say("'", Named("parameter", name),
                     "' has no matrix that a lane of this node orthogonalises: dmuonctl routing "
                     "names the owners of each"));
  }
  if (!request.parameters().empty()) return chosen;
  const size_t count = std::min<size_t>(here.size(), request.matrices());
  for (size_t i = 0; i < count; ++i) chosen.push_back(here[i * here.size() / count]);
  return chosen;
}

absl::StatusOr<v1::SampleUpdatesReply::Row> SampleCalls::Sample(
    scheduler::UnitId id, const std::shared_ptr<const scheduler::Plan>& plan,
    Core::Deadline deadline, const Core::Cancelled& cancelled) {
  const scheduler::Unit& unit = plan->units[id.value()];
  const int64_t elements = unit.rows * unit.cols;
  const size_t bytes = 2 * static_cast<size_t>(elements) * sizeof(float);
  kernels::cpu::CpuMemoryHolder holder;
  absl::StatusOr<wire::UniqueFd> memory = holder.Allocate(bytes, "a sampled update");
  if (!memory.ok()) return WithReason(memory.status(), "MEMORY_EXHAUSTED");
  auto mapping = kernels::cpu::MapShared(memory->get(), bytes);
  if (!mapping.ok()) return mapping.status();
  std::memset((*mapping)->data(), 0, bytes);  // pages that the lane need not wait for
  v1::LaneReport::UpdateCopied copied;
  {
    StateLock lock(core_.mutex);
    v1::LaneCommand command;
    command.mutable_copy_update()->set_unit(id.value());
    for (bool answered = false; !answered;) {
      // A lane that is replaced meanwhile has a successor, which hears nothing before it is ready.
      if (absl::Status published = core_.WaitUntilPublished(cancelled); !published.ok()) {
        return published;
      }
      if (!core_.job.exists() || core_.job.plan() != plan) {
        return Error(absl::StatusCode::kUnavailable, "JOB_ENDED", "the job ended");
      }
      const int64_t request = ++core_.unit_requests;
      const uint64_t generation = core_.lanes.generation();
      command.mutable_copy_update()->set_request(request);
      absl::Status sent = core_.lanes.Send(core_.RailOf(unit.owner), command, {memory->get()});
      if (!sent.ok() && !absl::IsUnavailable(sent)) return sent;
      const auto answer = core_.update_copies.emplace(request, std::nullopt).first;
      const absl::StatusOr<bool> come = core_.Wait(
          [&]() DMUOND_REQUIRES(core_.mutex) {
            return answer->second.has_value() || core_.job.plan() != plan ||
                   core_.lanes.generation() != generation;
          },
          deadline, cancelled);
      answered = answer->second.has_value();
      if (answered) copied = *std::move(answer->second);
      core_.update_copies.erase(answer);
      if (!come.ok()) return come.status();
      if (!answered && !*come) {
        return absl::DeadlineExceededError("no step has updated a matrix that was asked for");
      }
    }
  }
  if (!copied.error().empty()) return absl::InternalError(copied.error());
  v1::SampleUpdatesReply::Row row;
  row.set_lane(unit.owner.value());
  row.set_rows(unit.rows);
  row.set_cols(unit.cols);
  row.set_step(copied.step());
  row.set_held_us(copied.held_us());
  if (copied.rate() == 0) return row;
  const auto began = steady_clock::now();
  auto* const o = reinterpret_cast<float*>((*mapping)->data());
  const double squares = Direction(copied, o, o + elements, elements);
  row.set_orthogonality_error(kernels::OrthogonalityError(o, unit.rows, unit.cols));
  row.set_update_rms(copied.scale() * std::sqrt(squares / static_cast<double>(elements)));
  row.set_computed_us(MicrosecondsSince(began));
  return row;
}

}  // namespace dmuond::server
