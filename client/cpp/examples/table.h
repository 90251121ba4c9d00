// A table of numbers from a CSV file with one line of column names. The last column is the target.
#ifndef DMUOND_CLIENT_CPP_EXAMPLES_TABLE_H_
#define DMUOND_CLIENT_CPP_EXAMPLES_TABLE_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace example {

struct Table {
  size_t columns = 0;         // without the target
  std::vector<float> inputs;  // [rows, columns]
  std::vector<float> targets;

  [[nodiscard]] size_t rows() const { return targets.size(); }
};

// Every `stride`-th row from `first` on. INVALID_ARGUMENT naming file and line where it is no such
// table.
[[nodiscard]] absl::StatusOr<Table> ReadTable(const std::string& path, size_t first, size_t stride);

}  // namespace example

#endif  // DMUOND_CLIENT_CPP_EXAMPLES_TABLE_H_
