// An example trainer: fits a small network to the rows of a CSV file, the optimizer being dmuond's.
// Each of --world_size processes takes its share of the rows; the daemon averages their gradients.
// It survives its own death (start it again with --resume), a lane's and a daemon's: what it needs
// to go on from a step, the state of its random numbers, travels with that step.
//
//   dmuond --devices=cpu:1 --socket=/tmp/me/dmuond.sock &
//   dmuond-example-trainer --address=/tmp/me/dmuond.sock --data=waves.csv --steps=200
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <memory>
#include <random>
#include <sstream>
#include <string>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/flags/usage_config.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "dmuond/client/session.h"
#include "mlp.h"
#include "table.h"

ABSL_FLAG(std::string, address, "", "Socket of the daemon; empty: DMUOND_ADDRESS or the default");
ABSL_FLAG(std::string, job, "", "Name of the job; empty: DMUOND_JOB or 'default'");
ABSL_FLAG(int32_t, rank, -1, "Rank of this trainer; -1: RANK or 0");
ABSL_FLAG(int32_t, world_size, 0, "Trainers in the job; 0: WORLD_SIZE or 1");
ABSL_FLAG(std::string, data, "client/cpp/examples/waves.csv", "Table to fit: CSV, target last");
ABSL_FLAG(int64_t, steps, 100, "Steps to train");
ABSL_FLAG(int32_t, batch_rows, 0, "Rows of a step, drawn at random; 0: all of this trainer's");
ABSL_FLAG(int32_t, hidden, 32, "Width of the two hidden layers");
ABSL_FLAG(bool, resume, false, "Go on where the job is, if it has state: replaces a dead trainer");
ABSL_FLAG(double, learning_rate, 0.05, "At the first step; falls linearly to a tenth of it");

namespace {

using dmuond::client::Layout;
using dmuond::client::LayoutBuilder;
using dmuond::client::Options;
using dmuond::client::Outcome;
using dmuond::client::Registered;
using dmuond::client::Route;
using dmuond::client::RoutingRow;
using dmuond::client::Session;
using dmuond::client::StepScalars;
using example::kLayers;
using example::Mlp;
using example::Shape;
using example::Table;
using example::Tensors;

absl::StatusOr<Options> MakeOptions() {
  absl::StatusOr<Options> options = dmuond::client::OptionsFromEnvironment();
  if (!options.ok()) return options;
  if (!absl::GetFlag(FLAGS_address).empty()) options->address = absl::GetFlag(FLAGS_address);
  if (!absl::GetFlag(FLAGS_job).empty()) options->job = absl::GetFlag(FLAGS_job);
  if (absl::GetFlag(FLAGS_rank) >= 0) options->rank = absl::GetFlag(FLAGS_rank);
  if (absl::GetFlag(FLAGS_world_size) > 0) options->world_size = absl::GetFlag(FLAGS_world_size);
  if (absl::GetFlag(FLAGS_resume)) options->resume = dmuond::client::Resume::kIfPresent;
  return options;
}

// Parameter 2 * i is layer i's matrix, 2 * i + 1 its bias. Hidden matrices go to Muon; biases and
// the output layer, as is usual, to AdamW.
absl::StatusOr<Layout> MakeLayout(const Shape& shape, int32_t world_size) {
  LayoutBuilder builder(world_size);
  for (size_t layer = 0; layer < kLayers; ++layer) {
    const auto inputs = static_cast<int64_t>(shape.sizes[layer]);
    const auto outputs = static_cast<int64_t>(shape.sizes[layer + 1]);
    const bool hidden = layer + 1 < kLayers;
    builder.Add({.name = absl::StrCat("layer", layer, ".weight"),
                 .shape = {outputs, inputs},
                 .route = hidden ? Route::kMuon : Route::kAdamW,
                 .route_reason = hidden ? "hidden matrix" : "output layer"});
    builder.Add({.name = absl::StrCat("layer", layer, ".bias"),
                 .shape = {outputs},
                 .route = Route::kAdamW,
                 .route_reason = "bias"});
  }
  return builder.Build();
}

void PrintRouting(const Registered& registered) {
  for (const RoutingRow& row : registered.routing) {
    std::cout << "# " << row.parameter << " " << Name(row.route) << " (" << row.why << ")\n";
  }
}

// Draws a trainer's batches. Its whole state is a line of text.
class Batches {
 public:
  Batches(const Table& table, int32_t rank) : table_(table), random_(rank) {}

  Table Next() {
    const auto rows = static_cast<size_t>(absl::GetFlag(FLAGS_batch_rows));
    if (rows == 0) return table_;
    Table batch{.columns = table_.columns};
    for (size_t i = 0; i < rows; ++i) {
      const auto row = static_cast<ptrdiff_t>(random_() % table_.rows());
      const auto columns = static_cast<ptrdiff_t>(table_.columns);
      const auto inputs = table_.inputs.begin() + (row * columns);
      batch.inputs.insert(batch.inputs.end(), inputs, inputs + columns);
      batch.targets.push_back(table_.targets[row]);
    }
    return batch;
  }
  [[nodiscard]] std::string Remember() const {
    std::ostringstream state;
    state << random_;
    return state.str();
  }
  void Recall(const std::string& state) { std::istringstream(state) >> random_; }

 private:
  const Table& table_;
  std::mt19937_64 random_;
};

struct Model {
  Tensors weights;
  Tensors gradients;
};

// Where the daemon's memory is mapped: again after each return to a step with fresh memory.
Model Map(const Session& session) {
  Model model;
  for (size_t layer = 0; layer < kLayers; ++layer) {
    const auto matrix = static_cast<int32_t>(2 * layer);
    model.weights.matrices[layer] = session.Weight<float>(matrix);
    model.weights.biases[layer] = session.Weight<float>(matrix + 1);
    model.gradients.matrices[layer] = session.Gradient<float>(matrix);
    model.gradients.biases[layer] = session.Gradient<float>(matrix + 1);
  }
  return model;
}

absl::Status Train(Session& session, const Shape& shape, const Table& table) {
  Model model = Map(session);
  if (!session.has_state()) {
    example::Initialise(shape, /*seed=*/1, model.weights);
    absl::Status pushed = session.Push();
    if (!pushed.ok()) return pushed;
  }
  Mlp mlp(shape);
  Batches batches(table, session.rank());
  const std::string beginning = batches.Remember();
  const auto recall = [&] {
    batches.Recall(session.last_committed_step() == 0 ? beginning : session.trainer_state());
  };
  recall();
  StepScalars scalars;
  scalars.groups.resize(1);
  const int64_t steps = absl::GetFlag(FLAGS_steps);
  while (session.last_committed_step() < steps) {
    const int64_t step = session.last_committed_step() + 1;
    const double loss = mlp.LossAndGradients(batches.Next(), model.weights, model.gradients);
    const double done = static_cast<double>(step - 1) / static_cast<double>(steps);
    scalars.groups[0].learning_rate = absl::GetFlag(FLAGS_learning_rate) * (1 - 0.9 * done);
    absl::StatusOr<Outcome> outcome = session.Step(scalars, {.trainer_state = batches.Remember()});
    if (!outcome.ok()) return outcome.status();
    if (outcome->kind == Outcome::Kind::kRolledBack) {
      std::printf("back to %lld\n", static_cast<long long>(outcome->to_step));  // NOLINT
      model = Map(session);
      session.ReleaseStale();
      recall();
      continue;
    }
    std::printf("step %lld loss %.6f gradient_norm %.6f %s\n",
                static_cast<long long>(step),  // NOLINT
                loss, outcome->gradient_norm, Name(outcome->kind));
  }
  std::printf("final loss %.6f\n", mlp.LossAndGradients(table, model.weights, model.gradients));
  return session.Close();
}

absl::Status Run() {
  absl::StatusOr<Options> options = MakeOptions();
  if (!options.ok()) return options.status();
  absl::StatusOr<Table> table =
      example::ReadTable(absl::GetFlag(FLAGS_data), static_cast<size_t>(options->rank),
                         static_cast<size_t>(options->world_size));
  if (!table.ok()) return table.status();
  const auto hidden = static_cast<size_t>(absl::GetFlag(FLAGS_hidden));
  const Shape shape{{table->columns, hidden, hidden, 1}};
  absl::StatusOr<Layout> layout = MakeLayout(shape, options->world_size);
  if (!layout.ok()) return layout.status();

  absl::StatusOr<std::unique_ptr<Session>> session = Session::Open(*options);
  if (!session.ok()) return session.status();
  absl::StatusOr<Registered> registered = (*session)->Register(*layout);
  if (!registered.ok()) return registered.status();
  if (options->rank == 0) PrintRouting(*registered);
  absl::Status attached = (*session)->Attach();
  if (!attached.ok()) return attached;
  return Train(**session, shape, *table);
}

}  // namespace

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("fits a small network to a table, with dmuond as the optimizer");
  absl::FlagsUsageConfig shown;
  shown.contains_help_flags = [](absl::string_view file) {
    return absl::EndsWith(file, "/trainer.cc");
  };
  absl::SetFlagsUsageConfig(shown);
  absl::ParseCommandLine(argc, argv);
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // each step shows when it is done
  const absl::Status status = Run();
  if (status.ok()) return 0;
  std::cerr << "dmuond-example-trainer: " << status << " [" << dmuond::client::ReasonOf(status)
            << "]\n";
  return 1;
}
