#include "scheduler/matrix_view.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "scheduler/reason.h"

namespace dmuond::scheduler {
namespace {

// Heights of the blocks of rows, from the top.
std::vector<int64_t> BlockRows(const Parameter& parameter) {
  const int64_t rows = parameter.shape[parameter.shape.size() - 2];
  switch (parameter.view.kind) {
    case MatrixView::Kind::kWhole:
      return {rows};
    case MatrixView::Kind::kRowBlocks:
      return parameter.view.row_blocks;
    case MatrixView::Kind::kHeads:
      return std::vector<int64_t>(parameter.view.heads, rows / parameter.view.heads);
  }
  return {};
}

// So many that a message stays readable.
std::string ListOf(const std::vector<int64_t>& numbers) {
  constexpr size_t kShown = 16;
  if (numbers.size() <= kShown) return absl::StrJoin(numbers, ", ");
  return absl::StrCat(absl::StrJoin(numbers.begin(), numbers.begin() + kShown, ", "), ", ... (",
                      numbers.size(), " in all)");
}

int64_t LeadingElements(const Extents& shape) {
  int64_t count = 1;
  for (size_t d = 0; d + 2 < shape.size(); ++d) count *= shape[d];
  return count;
}

}  // namespace

absl::Status ValidateView(const Parameter& parameter) {
  const auto refuse = [&](auto&&... words) {
    return Error(absl::StatusCode::kInvalidArgument, "LAYOUT_INVALID",
                 Say("parameter '", Named("parameter", parameter.name), "' of shape ",
                     Named("shape", ShapeToString(parameter.shape)), ": ", words...));
  };
  if (parameter.shape.size() < 2) {
    return refuse("route muon needs matrices, and this has ",
                  Named("dimensions", parameter.shape.size()), " dimension(s); route it to adamw");
  }
  const int64_t rows = parameter.shape[parameter.shape.size() - 2];
  switch (parameter.view.kind) {
    case MatrixView::Kind::kWhole:
      return absl::OkStatus();
    case MatrixView::Kind::kRowBlocks: {
      int64_t sum = 0;
      for (int64_t block : parameter.view.row_blocks) {
        if (block <= 0) return refuse("a row block of ", Named("block_rows", block), " rows");
        if (block > rows - sum) {
          return refuse("row blocks (", Named("row_blocks", ListOf(parameter.view.row_blocks)),
                        ") have more rows than its ", Named("rows", rows));
        }
        sum += block;
      }
      if (sum != rows) {
        return refuse("row blocks (", Named("row_blocks", ListOf(parameter.view.row_blocks)),
                      ") have ", sum, " rows of its ", Named("rows", rows));
      }
      return absl::OkStatus();
    }
    case MatrixView::Kind::kHeads:
      if (parameter.view.heads <= 0 || rows % parameter.view.heads != 0) {
        return refuse(Named("heads", parameter.view.heads), " heads do not divide its ",
                      Named("rows", rows), " rows");
      }
      return absl::OkStatus();
  }
  return refuse("unknown matrix view ", Named("view", static_cast<int>(parameter.view.kind)));
}

std::vector<Box> MatricesOf(const Parameter& parameter) {
  const size_t dims = parameter.shape.size();
  const std::vector<int64_t> block_rows = BlockRows(parameter);
  std::vector<Box> matrices;
  matrices.reserve(CountMatrices(parameter));
  Box box = WholeBox(parameter.shape);
  for (size_t d = 0; d + 2 < dims; ++d) box.end[d] = 1;
  const int64_t leading = LeadingElements(parameter.shape);
  for (int64_t i = 0; i < leading; ++i) {
    int64_t row = 0;
    for (int64_t height : block_rows) {
      box.begin[dims - 2] = row;
      box.end[dims - 2] = row += height;
      matrices.push_back(box);
    }
    // The next index of the leading dimensions, in row-major order.
    for (size_t d = dims - 2; d > 0; --d) {
      if (++box.begin[d - 1] < parameter.shape[d - 1]) {
        box.end[d - 1] = box.begin[d - 1] + 1;
        break;
      }
      box.begin[d - 1] = 0;
      box.end[d - 1] = 1;
    }
  }
  return matrices;
}

int64_t CountMatrices(const Parameter& parameter) {
  int64_t blocks = 1;
  if (parameter.view.kind == MatrixView::Kind::kRowBlocks) {
    blocks = static_cast<int64_t>(parameter.view.row_blocks.size());
  } else if (parameter.view.kind == MatrixView::Kind::kHeads) {
    blocks = parameter.view.heads;
  }
  return LeadingElements(parameter.shape) * blocks;
}

std::string ToString(const MatrixView& view) {
  switch (view.kind) {
    case MatrixView::Kind::kWhole:
      return "whole";
    case MatrixView::Kind::kRowBlocks:
      return absl::StrCat(view.row_blocks.size(), " row blocks (", ListOf(view.row_blocks), ")");
    case MatrixView::Kind::kHeads:
      return absl::StrCat(view.heads, " heads");
  }
  return "unknown";
}

}  // namespace dmuond::scheduler
