#include "server/ctl/table.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/shown.h"

namespace dmuond::server::ctl {
namespace {

size_t Width(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  }));
}

}  // namespace

Table::Table(std::vector<std::string> header) {
  for (std::string& name : header) {
    right_.push_back(!name.empty() && name.front() == '>');
    if (right_.back()) name.erase(0, 1);
  }
  rows_.push_back(std::move(header));
}

void Table::Add(std::vector<std::string> cells) {
  for (std::string& cell : cells) cell = scheduler::Shown(cell);
  rows_.push_back(std::move(cells));
}

std::string Table::Text() const {
  std::vector<size_t> widths(right_.size());
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], Width(row[i]));
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      if (i > 0) line += "  ";
      const std::string space(widths[i] - Width(row[i]), ' ');
      line += right_[i] ? space + row[i] : row[i] + space;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&text, line, "\n");
  }
  return text;
}

std::string PictureAge(int64_t age_ms) {
  if (age_ms == 0) return "";
  return absl::StrCat("this picture is ", HumanSeconds(age_ms / 1000),
                      " old: the daemon's core has not turned since\n");
}

}  // namespace dmuond::server::ctl
