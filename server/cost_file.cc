#include "server/cost_file.h"

#include <cerrno>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "google/protobuf/io/tokenizer.h"
#include "google/protobuf/text_format.h"
#include "scheduler/convert/convert.h"
#include "server/common/whole_file.h"

namespace dmuond::server {
namespace {

// Keeps the first error of a parser.
class FirstError final : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int line, int column, const std::string& message) override {
    if (text_.empty()) text_ = absl::StrCat(line + 1, ":", column + 1, ": ", message);
  }
  [[nodiscard]] const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// Beyond these, times that the planner computes would be infinite. 1e12 us are eleven days.
constexpr double kMicrosecondsMax = 1e12;
constexpr double kRateMin = 1e-9;
constexpr double kRateMax = 1e9;
constexpr int64_t kSideMax = int64_t{1} << 40;

// 0: it is not given.
bool IsRate(double rate) { return rate == 0 || (rate >= kRateMin && rate <= kRateMax); }

bool IsSide(int64_t side) { return side > 0 && side <= kSideMax; }

// Returns what is wrong with the table; empty: nothing is.
std::string MistakeIn(const v1::CostTable& table) {
  if (!IsRate(table.tflops()) || !IsRate(table.gigabytes_per_second())) {
    return absl::StrCat("tflops ", table.tflops(), " and gigabytes_per_second ",
                        table.gigabytes_per_second(), " are not both 0, or from ", kRateMin, " to ",
                        kRateMax);
  }
  if (!(table.launch_us() >= 0 && table.launch_us() <= kMicrosecondsMax)) {
    return absl::StrCat("launch_us ", table.launch_us(), " is not from 0 to ", kMicrosecondsMax);
  }
  const scheduler::CostTable costs = FromProto(table);
  for (size_t i = 0; i < costs.entries.size(); ++i) {
    const scheduler::CostEntry& entry = costs.entries[i];
    if (scheduler::IsPossible(entry) && IsSide(entry.matrix.rows) && IsSide(entry.matrix.cols) &&
        entry.microseconds <= kMicrosecondsMax) {
      continue;
    }
    return absl::StrCat("entry ", i + 1, " (", entry.matrix.rows, " x ", entry.matrix.cols,
                        ", batch ", entry.batch, ", ", entry.microseconds, " us, ",
                        entry.matrix.iteration.steps, " steps, ", entry.matrix.iteration.rounds,
                        " rounds): all must be above 0, microseconds at most ", kMicrosecondsMax,
                        ", rows and cols at most ", kSideMax, ", and rounds no more than steps");
  }
  for (int i = 0; i < table.choices_size(); ++i) {
    const v1::CostTable::Choice& choice = table.choices(i);
    if (IsSide(choice.rows()) && IsSide(choice.cols()) && v1::ElementType_IsValid(choice.dtype()) &&
        v1::CostTable::Engine_IsValid(choice.engine()) &&
        v1::GroupConfig::Form_IsValid(choice.form())) {
      continue;
    }
    return absl::StrCat("choice ", i + 1, " (", choice.rows(), " x ", choice.cols(), ", dtype ",
                        choice.dtype(), ", engine ", choice.engine(), ", form ", choice.form(),
                        "): rows and cols must be from 1 to ", kSideMax,
                        ", the others names that there are");
  }
  return "";
}

}  // namespace

absl::StatusOr<scheduler::CostTable> ReadCostTable(const std::string& path) {
  const absl::StatusOr<std::string> text = WholeFile(path);
  if (!text.ok()) {
    return absl::Status(text.status().code(),
                        absl::StrCat("cost table ", path, " ", text.status().message()));
  }
  FirstError error;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  v1::CostTable table;
  if (!parser.ParseFromString(*text, &table)) {
    return absl::InvalidArgumentError(absl::StrCat("cost table ", path, ":", error.text()));
  }
  if (const std::string mistake = MistakeIn(table); !mistake.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("cost table ", path, ": ", mistake));
  }
  return FromProto(table);
}

absl::Status WriteCostTable(const scheduler::CostTable& costs, const std::string& path) {
  std::string text;
  google::protobuf::TextFormat::PrintToString(ToProto(costs), &text);
  std::ofstream file(path);
  file << text;
  file.flush();
  return file ? absl::OkStatus() : absl::ErrnoToStatus(errno, absl::StrCat("cost table ", path));
}

std::vector<kernels::KernelChoice> ToChoices(const scheduler::CostTable& costs) {
  std::vector<kernels::KernelChoice> choices;
  for (const scheduler::ShapeChoice& choice : costs.choices) {
    choices.push_back({choice.rows, choice.cols, ToDType(choice.dtype),
                       static_cast<kernels::ProductEngine>(choice.engine),
                       static_cast<kernels::NewtonSchulzForm>(choice.form)});
  }
  return choices;
}

}  // namespace dmuond::server
