// Where the trainer of the fault matrix has its weights and gradients while it computes.
#ifndef DMUOND_TESTS_FAULTS_TRAINER_MEMORY_H_
#define DMUOND_TESTS_FAULTS_TRAINER_MEMORY_H_

#include <memory>
#include <span>
#include <string>

#include "dmuond/client/session.h"

namespace dmuond::testing {

// In the arenas themselves, which are host memory.
class TrainerMemory {
 public:
  TrainerMemory() = default;
  virtual ~TrainerMemory() = default;
  TrainerMemory(const TrainerMemory&) = delete;
  TrainerMemory& operator=(const TrainerMemory&) = delete;

  // Gives the layout's arenas memory of the trainer's own, where it has some.
  virtual absl::Status Place(client::Layout& /*layout*/) { return absl::OkStatus(); }
  // For Options.
  [[nodiscard]] virtual std::shared_ptr<client::Arenas> arenas() const { return nullptr; }
  [[nodiscard]] virtual std::span<float> Weights(client::Session& session, int32_t parameter) {
    return session.Weight<float>(parameter);
  }
  [[nodiscard]] virtual std::span<float> Gradients(client::Session& session, int32_t parameter) {
    return session.Gradient<float>(parameter);
  }
  // What is there goes to the arenas.
  virtual absl::Status SendGradients(client::Session& /*session*/, int32_t /*parameter*/) {
    return absl::OkStatus();
  }
  virtual absl::Status SendWeights(client::Session& /*session*/) { return absl::OkStatus(); }
  // What is in the arenas comes here.
  virtual absl::Status FetchWeights(client::Session& /*session*/) { return absl::OkStatus(); }
  virtual absl::Status MarkReady(client::Session& session, int32_t bucket) {
    session.MarkReady(bucket);
    return absl::OkStatus();
  }
  // As Session::Step(); the new weights are here.
  virtual absl::StatusOr<client::Outcome> Step(client::Session& session,
                                               const client::StepScalars& scalars,
                                               const client::SubmitOptions& options) {
    return session.Step(scalars, options);
  }
};

// `device`: "cpu", or "cuda:ORDINAL" where the program has it; with ",own" arenas lie in memory of
// the trainer's own.
[[nodiscard]] absl::StatusOr<std::unique_ptr<TrainerMemory>> MakeTrainerMemory(
    const std::string& device, int32_t parameters);

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_FAULTS_TRAINER_MEMORY_H_
