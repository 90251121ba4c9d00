// Measures what Muon updates cost on this machine's GPU and writes the planner's cost table
// (scheduler/cost_model.h): a file for `dmuond --cost_table`.
//   muon_tune [-o FILE] [-m MODEL[:LAYERS],...] [-c ROWSxCOLS:COUNT,...] [-l LANES] [-p preset]
//             [-s SECONDS] [-n deterministic|fastest]
// -n fastest: also chooses by measurement how each shape is computed: its form, its engine, and
// ways in which a matrix's bits depend on its batch.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/update_tuner.h"
#include "kernels/presets.h"
#include "scheduler/convert/convert.h"
#include "scheduler/limits.h"
#include "scheduler/model_shapes.h"
#include "server/cost_file.h"

namespace dmuond::bench {
namespace {

using kernels::NewtonSchulzForm;
using kernels::ProductEngine;
using kernels::cuda::TunedCandidate;
using kernels::cuda::TunedShape;
using kernels::cuda::TuningTask;

struct Options {
  std::string out;
  std::vector<std::string> models;
  std::vector<std::string> shapes;
  int lanes = 4;
  std::string preset = "dmuon";
  kernels::cuda::TuningOptions tuning;
};

void Fail(const absl::Status& status) {
  std::fprintf(stderr, "muon_tune: %s\n", std::string(status.message()).c_str());
  std::exit(1);
}

std::vector<std::string> SplitList(const std::string& text) {
  std::vector<std::string> items;
  std::stringstream list(text);
  for (std::string item; std::getline(list, item, ',');) items.push_back(item);
  return items;
}

// Batches that a plan for so many lanes may use: a lane may get more than its share of one shape.
std::vector<int32_t> Batches(int64_t count, int lanes) {
  const int64_t share =
      std::min<int64_t>({scheduler::kBatchMax, count,
                         std::max<int64_t>(1, (3 * count + 2 * lanes - 1) / (2 * lanes))});
  std::vector<int32_t> batches;
  for (const int32_t batch : {1, 2, 4, 8, 16, 32, 64}) {
    if (batch < share) batches.push_back(batch);
  }
  batches.push_back(static_cast<int32_t>(share));
  return batches;
}

std::vector<TuningTask> Tasks(const Options& options) {
  std::map<std::pair<int64_t, int64_t>, int64_t> counts;  // the largest of any model
  const auto add = [&](int64_t rows, int64_t cols, int64_t count) {
    int64_t& known = counts[{rows, cols}];
    known = std::max(known, count);
  };
  for (const std::string& model : options.models) {
    const auto colon = model.find(':');
    const auto shapes = scheduler::FindModelShapes(
        model.substr(0, colon), colon == std::string::npos ? 0 : std::atoi(&model[colon + 1]));
    if (!shapes.ok()) Fail(shapes.status());
    std::map<std::pair<int64_t, int64_t>, int64_t> of_model;
    for (const scheduler::ShapeCount& shape : shapes->muon) {
      of_model[{shape.rows, shape.cols}] += shape.count;
    }
    for (const auto& [shape, count] : of_model) add(shape.first, shape.second, count);
  }
  for (const std::string& shape : options.shapes) {
    const size_t by = shape.find('x');
    const size_t colon = shape.find(':');
    int64_t rows = 0;
    int64_t cols = 0;
    int64_t count = 1;
    if (by == std::string::npos || !absl::SimpleAtoi(shape.substr(0, by), &rows) ||
        !absl::SimpleAtoi(shape.substr(by + 1, colon == std::string::npos ? colon : colon - by - 1),
                          &cols) ||
        (colon != std::string::npos && !absl::SimpleAtoi(shape.substr(colon + 1), &count)) ||
        rows < 1 || cols < 1 || count < 1) {
      Fail(absl::InvalidArgumentError("-c " + shape + ": expected ROWSxCOLS:COUNT"));
    }
    add(rows, cols, count);
  }
  std::vector<TuningTask> tasks;
  for (const auto& [shape, count] : counts) {
    tasks.push_back({shape.first, shape.second, Batches(count, options.lanes)});
  }
  return tasks;
}

const char* Name(ProductEngine engine) {
  return engine == ProductEngine::kOwn ? "own" : "cublaslt";
}
const char* Name(NewtonSchulzForm form) {
  return form == NewtonSchulzForm::kGram ? "gram" : "standard";
}

void Print(const TunedShape& shape) {
  for (size_t i = 0; i < shape.candidates.size(); ++i) {
    const TunedCandidate& c = shape.candidates[i];
    std::printf("%s %6d %6d %-9s %-9s %10.2e ", i == shape.winner ? "*" : " ",
                static_cast<int>(shape.rows), static_cast<int>(shape.cols), Name(c.choice.engine),
                Name(c.choice.form), c.error);
    if (c.refused.empty()) {
      std::printf("%10.1f us, batch %d\n", c.microseconds, c.batch);
    } else {
      std::printf("refused: %s\n", c.refused.c_str());
    }
  }
  std::printf("#   us per matrix:");
  for (const auto& [batch, microseconds] : shape.times) {
    std::printf(" %d: %.1f", batch, microseconds / batch);
  }
  std::printf("\n");
}

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    const std::string value = argv[i + 1];
    if (flag == "-o") options.out = value;
    if (flag == "-m") options.models = SplitList(value);
    if (flag == "-c") options.shapes = SplitList(value);
    if (flag == "-l") options.lanes = std::max(1, std::atoi(value.c_str()));
    if (flag == "-p") options.preset = value;
    if (flag == "-s") options.tuning.seconds = std::atof(value.c_str());
    if (flag == "-n") options.tuning.fastest = value == "fastest";
  }
  const auto begin = std::chrono::steady_clock::now();
  auto device = kernels::cuda::CudaDevice::Create(0);
  if (!device.ok()) Fail(device.status());
  const auto preset = kernels::FindPreset(options.preset);
  if (!preset.ok()) Fail(preset.status());
  options.tuning.config = *preset;
  const std::vector<TuningTask> tasks = Tasks(options);
  const std::string key = (*device)->DescribeType() + " preset=" + options.preset;
  std::printf("# %s\n# %zu shapes\n#%6s %6s %-9s %-9s %10s\n", key.c_str(), tasks.size(), "rows",
              "cols", "engine", "form", "error");
  std::fflush(stdout);
  // What has passed since the start belongs to the time that was asked for.
  options.tuning.seconds -=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const auto tuned = kernels::cuda::TuneUpdates(tasks, options.tuning);
  if (!tuned.ok()) Fail(tuned.status());
  for (const TunedShape& shape : *tuned) Print(shape);
  scheduler::CostTable table;
  table.device = key;
  const scheduler::Iteration iteration = IterationOf(preset->newton_schulz);
  for (const TunedShape& shape : *tuned) {
    for (const auto& [batch, microseconds] : shape.times) {
      table.entries.push_back({{shape.rows, shape.cols, iteration}, batch, microseconds});
    }
    if (shape.winner == 0) continue;  // the default
    const kernels::KernelChoice& choice = shape.candidates[shape.winner].choice;
    table.choices.push_back(
        {choice.rows, choice.cols, static_cast<scheduler::ElementType>(choice.dtype),
         static_cast<uint8_t>(choice.engine), static_cast<uint8_t>(choice.form)});
  }
  if (!options.out.empty()) {
    const absl::Status status = server::WriteCostTable(table, options.out);
    if (!status.ok()) Fail(status);
  }
  std::printf("# %.1f s, %zu entries, %zu choices that are not the default\n",
              std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(),
              table.entries.size(), table.choices.size());
  return 0;
}

}  // namespace
}  // namespace dmuond::bench

int main(int argc, char** argv) { return dmuond::bench::Main(argc, argv); }
