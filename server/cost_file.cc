#include "server/cost_file.h"

#include <cerrno>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "google/protobuf/io/tokenizer.h"
#include "google/protobuf/text_format.h"
#include "scheduler/convert/convert.h"

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

}  // namespace

absl::StatusOr<scheduler::CostTable> ReadCostTable(const std::string& path) {
  std::ifstream file(path);
  if (!file) return absl::ErrnoToStatus(errno, absl::StrCat("cost table ", path));
  std::ostringstream text;
  text << file.rdbuf();
  FirstError error;
  google::protobuf::TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  v1::CostTable table;
  if (!parser.ParseFromString(text.str(), &table)) {
    return absl::InvalidArgumentError(absl::StrCat("cost table ", path, ":", error.text()));
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
