// What the trainers of a benchmark step on: matrices on Muon, and one vector on AdamW.
#ifndef DMUOND_BENCH_COMMON_MODEL_H_
#define DMUOND_BENCH_COMMON_MODEL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "dmuond/client/session.h"

namespace dmuond::bench {

struct Matrices {
  int64_t rows = 64;  // of each
  int64_t cols = 64;
  int count = 0;
};

struct Model {
  std::vector<Matrices> matrices;
  int64_t vector = 0;  // elements; 0: none

  [[nodiscard]] int64_t parameters() const;
  // Of the optimizer, bytes: master and momentum, or master and two moments, in fp32.
  [[nodiscard]] int64_t state_bytes() const;
};

[[nodiscard]] absl::StatusOr<client::Layout> MakeLayout(const Model& model, int trainers);

// The command line of a trainer on `model`, and what such a command line says.
[[nodiscard]] std::vector<std::string> TrainerFlags(int32_t rank, int trainers,
                                                    const std::string& address, const Model& model);
[[nodiscard]] Model ModelOfFlags();
[[nodiscard]] int TrainersOfFlags();
[[nodiscard]] std::string AddressOfFlags();

// Small pseudo-random values. REQUIRES: attached.
void FillWeights(client::Session& session, const Model& model);
void FillGradients(client::Session& session, const Model& model, int32_t rank);

}  // namespace dmuond::bench

#endif  // DMUOND_BENCH_COMMON_MODEL_H_
