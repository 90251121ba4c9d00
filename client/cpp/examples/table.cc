#include "table.h"

#include <fstream>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace example {

absl::StatusOr<Table> ReadTable(const std::string& path, size_t first, size_t stride) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) {
    return absl::InvalidArgumentError(absl::StrCat("'", path, "' cannot be read, or is empty"));
  }
  Table table;
  table.columns = std::vector<std::string>(absl::StrSplit(line, ',')).size() - 1;
  for (size_t row = 0; std::getline(file, line); ++row) {
    const std::vector<std::string> cells = absl::StrSplit(line, ',');
    std::vector<float> numbers(cells.size());
    bool good = cells.size() == table.columns + 1 && table.columns > 0;
    for (size_t i = 0; good && i < cells.size(); ++i) {
      good = absl::SimpleAtof(cells[i], &numbers[i]);
    }
    if (!good) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ":", row + 2, ": not ", table.columns + 1, " numbers: '", line, "'"));
    }
    if (row < first || (row - first) % stride != 0) continue;
    table.inputs.insert(table.inputs.end(), numbers.begin(), numbers.end() - 1);
    table.targets.push_back(numbers.back());
  }
  if (table.rows() == 0) {
    return absl::InvalidArgumentError(absl::StrCat("'", path, "' has no row for this trainer"));
  }
  return table;
}

}  // namespace example
