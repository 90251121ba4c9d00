// Macros for a function that returns a status: they call another one, and return its error.
// Example:
//   absl::Status Start(const Options& options) {
//     RETURN_IF_ERROR(Check(options));
//     ASSIGN_OR_RETURN(const Address address, Resolve(options.name));
//     return Listen(address);
//   }
#ifndef DMUOND_BASE_STATUS_MACROS_H_
#define DMUOND_BASE_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Returns the absl::Status of the expression from the function around it, unless it is OK.
#define RETURN_IF_ERROR(...)                                               \
  do {                                                                     \
    if (absl::Status dmuond_status = (__VA_ARGS__); !dmuond_status.ok()) { \
      return dmuond_status;                                                \
    }                                                                      \
  } while (false)

// Declares, or assigns to, `to` the value of the expression, an absl::StatusOr; returns its status
// from the function around it if it has none. It is more than one statement: never the only one of
// an `if` or a loop without braces. A type with a comma is given a name first.
#define ASSIGN_OR_RETURN(to, ...) \
  DMUOND_ASSIGN_OR_RETURN(DMUOND_RESULT_NAME(__LINE__), to, __VA_ARGS__)

#define DMUOND_RESULT_NAME(line) DMUOND_RESULT_NAME_OF(line)
#define DMUOND_RESULT_NAME_OF(line) dmuond_result_##line
// NOLINTBEGIN(bugprone-macro-parentheses): a declaration
#define DMUOND_ASSIGN_OR_RETURN(result, to, ...)       \
  auto result = (__VA_ARGS__);                         \
  if (!result.ok()) return std::move(result).status(); \
  to = *std::move(result)
// NOLINTEND(bugprone-macro-parentheses)

#endif  // DMUOND_BASE_STATUS_MACROS_H_
