// Columns of text for people.
//
//   Table table({"lane", ">load"});     // '>': numbers, to the right
//   table.Add({"0", "12.5 ms"});
//   std::cout << table.Text();
#ifndef DMUOND_SERVER_CTL_TABLE_H_
#define DMUOND_SERVER_CTL_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "server/common/human.h"

namespace dmuond::server::ctl {

class Table {
 public:
  explicit Table(std::vector<std::string> header);
  // What others have written is escaped (scheduler/shown.h). REQUIRES: as many cells as the header
  // has.
  void Add(std::vector<std::string> cells);
  // A line for the header, one for each row; widths in characters, UTF-8.
  [[nodiscard]] std::string Text() const;

 private:
  std::vector<bool> right_;
  std::vector<std::vector<std::string>> rows_;  // the header first
};

// Of an answer's picture_age_ms: a line that says how old it is; empty: it is not old.
[[nodiscard]] std::string PictureAge(int64_t age_ms);

}  // namespace dmuond::server::ctl

#endif  // DMUOND_SERVER_CTL_TABLE_H_
