// Values of the client: what a trainer says of its parameters, and what it hears of its steps. They
// mirror proto/dmuond/v1/types.proto, whose comments hold here too, without any protobuf in a
// trainer's translation units. Plain values; no threads, no ownership of memory.
#ifndef DMUOND_CLIENT_TYPES_H_
#define DMUOND_CLIENT_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace dmuond::client {

using Extents = std::vector<int64_t>;  // elements, outermost dimension first

enum class ElementType : uint8_t { kFloat32 = 1, kBFloat16 = 2, kFloat16 = 3 };
// Bytes of one element.
[[nodiscard]] constexpr int64_t SizeOf(ElementType type) {
  return type == ElementType::kFloat32 ? 4 : 2;
}

// Who updates a parameter.
enum class Route : uint8_t {
  kMuon = 1,    // orthogonalised by Muon, one or several matrices
  kAdamW = 2,   // AdamW, element by element
  kTrainer = 3  // left alone: the daemon neither reads nor restores it
};
[[nodiscard]] const char* Name(Route route);  // "muon", "adamw", "trainer"

// How the gradients of one box at several holders come together.
enum class Contribution : uint8_t {
  kSum = 1,   // added over all holders that say so
  kSame = 2,  // equal everywhere already: the lowest rank's is taken
  kNone = 3   // not read: equals that of another holder, which says kSum
};

// Which 2-D matrices a parameter on Route::kMuon consists of. Dimensions before the last two are a
// batch.
struct MatrixView {
  enum class Kind : uint8_t {
    kWhole = 1,      // the last two dimensions are one matrix
    kRowBlocks = 2,  // consecutive blocks of `row_blocks` rows, as in a fused QKV projection
    kHeads = 3       // `heads` equal blocks of rows
  };
  Kind kind = Kind::kWhole;
  Extents row_blocks;
  int64_t heads = 0;
};

// A half-open n-d box of element indices.
struct Box {
  Extents begin;
  Extents end;
};
[[nodiscard]] int64_t Elements(const Box& box);  // 1 for a scalar's box without dimensions

// A logical tensor; every trainer that registers a name says the same of it.
struct Parameter {
  std::string name;
  Extents shape;  // of the whole tensor
  ElementType weight_type = ElementType::kFloat32;
  ElementType gradient_type = ElementType::kFloat32;
  Route route = Route::kMuon;
  std::string route_reason;  // shown in the routing table
  MatrixView view;           // Route::kMuon only
  int32_t group = 0;         // index of its hyperparameter group
  double reduce_factor = 1;  // multiplies the reduced gradient, e.g. 1 / world size
  int32_t ready_order = 0;   // smaller: its gradient is complete earlier in the backward pass
  // `reduce_factor` is right only where every rank holds all of it; where one does not, the daemon
  // refuses (DIVISOR_UNKNOWN).
  bool held_by_all = false;
};

// Where one box lies in an arena of this trainer.
struct Slice {
  uint32_t arena = 0;
  int64_t offset_bytes = 0;  // of the box's first element
  Extents strides;           // elements, one for each dimension
};

// What this trainer holds of a parameter.
struct Fragment {
  int32_t parameter = 0;  // index into the same layout's parameters
  Box box;                // may be empty
  Contribution contribution = Contribution::kSum;
  Slice gradient;  // read by the daemon, never written
  Slice weight;    // written by the daemon after each step
};

// A flat buffer that the daemon allocates and this trainer maps, or that this trainer has.
struct ArenaSpec {
  uint32_t id = 0;  // unique in the session
  int64_t size_bytes = 0;
  // The trainer has this memory already: it is on the device of Options::arenas and begins at a
  // multiple of 16 bytes. Lanes map the whole allocation that it lies in. The trainer must keep it
  // until Close() has returned or the process ends. A replacement gets the weights anew, in memory
  // of its own. Null: the daemon allocates the arena.
  std::byte* memory = nullptr;
};

struct Coefficients {
  double a = 0;
  double b = 0;
  double c = 0;
};

// What is computed for the parameters of a group; fixed for the life of a job. Unset members come
// from the preset; docs/maths.md lists each preset's values.
struct GroupConfig {
  enum class Momentum : uint8_t { kSum = 1, kEma = 2 };
  enum class Form : uint8_t { kStandard = 1, kGram = 2 };
  enum class Norm : uint8_t { kExact = 1, kPlusEps = 2, kClampedEps = 3, kSchatten4 = 4 };
  enum class Scale : uint8_t { kMatchRmsAdamW = 1, kOriginal = 2, kSpectral = 3, kNone = 4 };
  std::string preset;  // "dmuon" (also when empty), "torch", "keller" or "moonlight"
  std::optional<Momentum> momentum;
  std::optional<bool> nesterov;
  std::optional<Scale> scale;
  std::optional<Form> form;
  std::optional<Norm> norm;
  std::optional<double> eps;                      // of the norm rule
  std::optional<ElementType> newton_schulz_type;  // what intermediate matrices are rounded to
  std::vector<Coefficients> coefficients;         // one for each iteration; empty: the preset's
  // Gram form: the steps, counted from 0, before which X is made anew, in every shape. Empty: the
  // preset's, or none where there are `coefficients`.
  std::vector<int32_t> restarts;
};

// The numbers of one step for one group. Every trainer must submit the same, bit by bit. None of
// them comes from the group's preset: learning rate and weight decay are what is said here, and 0
// where nothing is, though originals have defaults of their own (torch and moonlight decay by 0.1).
struct GroupScalars {
  double learning_rate = 0;
  double weight_decay = 0;
  double momentum = 0.95;  // Muon
  double beta1 = 0.9;      // AdamW
  double beta2 = 0.999;    // AdamW
  double eps = 1e-8;       // AdamW
};

// The weights that a trainer begins with, as digests. For one that knows them before Attach().
struct FirstWeights {
  // For each fragment of the layout, in its order, the first 16 bytes of the SHA-256 of its
  // elements, little-endian, row-major; "" where there is nothing to compare. A fresh job fails
  // (WEIGHTS_DIFFER, from Attach() or Push()) where trainers that hold a box have different ones,
  // before anything is written to an arena. Empty: nothing is compared.
  std::vector<std::string> digests;
  // On all ranks: the lowest rank's weights go to all holders of a box, whatever those have.
  bool broadcast = false;
};

struct StepScalars {
  std::vector<GroupScalars> groups;  // one for each registered group, in order
  double loss_scale = 1;             // gradients are divided by it
  double max_grad_norm = 0;          // joint norm of all reduced gradients; 0: no clipping
  bool clip_muon = true;             // false: the coefficient applies to AdamW parameters alone
};

// How a step ended.
struct Outcome {
  enum class Kind : uint8_t {
    kPending = 0,    // not decided within the time that the call was to wait
    kCommitted = 1,  // applied once, on every owner; consumes the step number
    kSkipped = 2,    // non-finite gradients: nothing has changed; consumes the step number
    kAborted = 3,    // nothing has changed; see `retry`
    kRolledBack = 4  // weights and optimizer are those after `to_step`: go on from there
  };
  enum class Reason : uint8_t {
    kNone = 0,
    kNonFinite = 1,
    kWithdrawn = 2,
    kTrainerMissing = 3,
    kLaneLost = 4,
    kPeerLost = 5,
    kStateLost = 6,
    kDraining = 7,
    kLayoutChanged = 8
  };
  Kind kind = Kind::kPending;
  int64_t step = 0;
  uint64_t attempt = 0;
  Reason reason = Reason::kNone;
  std::string detail;  // for people
  bool retry = false;  // kAborted: the same gradients may be submitted again
  uint64_t next_attempt = 0;
  std::optional<int64_t> durable_step;  // unset: losing a daemon loses the job's state
  int64_t to_step = 0;                  // kRolledBack
  double gradient_norm = 0;             // joint norm of all reduced gradients, before clipping
  double clip_coefficient = 1;
  int64_t matrices = 0;  // orthogonalised in this step, in the whole world
  // kRolledBack: what this trainer submitted with `to_step`, and whether weights and gradients lie
  // in other memory than before, because the daemon has a successor.
  std::string trainer_state;
  bool fresh_memory = false;
};
[[nodiscard]] const char* Name(Outcome::Kind kind);  // "committed", …

// A snapshot that is durable.
struct Snapshot {
  int64_t step = 0;
  std::string path;
};

// How long the parts of the last published step took on this node: microseconds, slowest lane.
struct StepTiming {
  double collect_us = 0;
  double decide_us = 0;
  double update_us = 0;
  double publish_us = 0;
  double quiet_us = 0;  // from the last gradient that was there and submitted on
  // Work on memory alone, and the bytes that it read and wrote.
  double sum_us = 0;
  int64_t sum_bytes = 0;
  double norm_us = 0;
  double copy_us = 0;
  int64_t copy_bytes = 0;
};

// One line of the routing table: who updates a parameter, and why.
struct RoutingRow {
  std::string parameter;
  Route route = Route::kTrainer;
  int32_t matrices = 0;
  std::vector<int32_t> owners;  // lanes of the world (node * lanes per node + lane)
  std::string why;
  int32_t bucket = -1;  // -1: Route::kTrainer
};

// What the daemon answers to a registration.
struct Registered {
  std::vector<RoutingRow> routing;        // every parameter of the job
  std::vector<int32_t> parameter_bucket;  // of each parameter of this trainer's layout; -1: none
  uint32_t buckets = 0;
  uint64_t plan_digest = 0;
  double makespan_us = 0;     // the planner's estimate of the slowest lane's update
  double lower_bound_us = 0;  // proven: no assignment is faster
  double imbalance = 1;       // slowest lane over mean
};

// Optimizer state that can be read and written.
enum class StateKind : uint8_t {
  kMaster = 1,    // fp32 weights
  kMomentum = 2,  // Muon's buffer
  kExpAvg = 3,    // AdamW's first moment
  kExpAvgSq = 4,  // AdamW's second moment
  kStep = 5       // updates applied to the parameter: one value
};

}  // namespace dmuond::client

#endif  // DMUOND_CLIENT_TYPES_H_
