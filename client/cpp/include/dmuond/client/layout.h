// A trainer's layout: its parameters, the boxes it holds of them, and where these lie in its
// arenas. Trainers with an allocation of their own fill a Layout by hand; the others name their
// parameters and let the builder lay them out, gradients in one arena and weights in another:
//
//   LayoutBuilder builder(world_size);
//   builder.AddGroup({.preset = "torch"});
//   const int w1 = builder.Add({.name = "w1", .shape = {64, 32}});
//   const int b1 = builder.Add({.name = "b1", .shape = {64}, .route = Route::kAdamW});
//   absl::StatusOr<Layout> layout = builder.Build();
//
// Threads: one at a time. The builder owns nothing but values.
#ifndef DMUOND_CLIENT_LAYOUT_H_
#define DMUOND_CLIENT_LAYOUT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "dmuond/client/types.h"

namespace dmuond::client {

struct Layout {
  std::vector<Parameter> parameters;
  std::vector<Fragment> fragments;
  std::vector<GroupConfig> groups;  // equal on all trainers
  std::vector<ArenaSpec> arenas;    // all that the fragments name
  int64_t bucket_bytes = 0;         // gradient bytes per bucket, about; 0: 32 MiB
};

inline constexpr uint32_t kGradientArena = 1;
inline constexpr uint32_t kWeightArena = 2;
// Every tensor begins at a multiple of it: a cache line, and a whole vector register.
inline constexpr int64_t kTensorAlignment = 64;

// One parameter as a simple trainer sees it.
struct ParameterSpec {
  std::string name;
  Extents shape;  // of the whole tensor
  ElementType type = ElementType::kFloat32;
  std::optional<ElementType> gradient_type;  // unset: as `type`
  Route route = Route::kMuon;
  MatrixView view;
  int32_t group = 0;
  // What this trainer holds; unset: all of it, as every other trainer does (replicated).
  std::optional<Box> box;
  Contribution contribution = Contribution::kSum;
  // Unset: 1 / world size for a replicated sum, which every rank must hold then (the daemon refuses
  // it otherwise, DIVISOR_UNKNOWN: a pipeline's stage, an expert), else 1.
  std::optional<double> reduce_factor;
  // Unset: the parameter added last is ready first, as in a backward pass.
  std::optional<int32_t> ready_order;
  std::string route_reason;
};

class LayoutBuilder {
 public:
  explicit LayoutBuilder(int32_t world_size) : world_size_(world_size) {}

  // Returns the index by which parameters name the group. Without any, there is one of defaults.
  int32_t AddGroup(GroupConfig group);
  // Returns the parameter's index, by which the session names it.
  int32_t Add(ParameterSpec spec);
  void set_bucket_bytes(int64_t bytes) { bucket_bytes_ = bytes; }

  // INVALID_ARGUMENT naming the parameter when a shape or box makes no sense; what needs the other
  // trainers is checked by the daemon.
  [[nodiscard]] absl::StatusOr<Layout> Build() const;

 private:
  const int32_t world_size_;
  int64_t bucket_bytes_ = 0;
  std::vector<GroupConfig> groups_;
  std::vector<ParameterSpec> specs_;
};

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_LAYOUT_H_
