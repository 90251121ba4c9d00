// Property tests with their own number of cases.
#ifndef DMUOND_TESTS_SCHEDULER_PROPERTY_H_
#define DMUOND_TESTS_SCHEDULER_PROPERTY_H_

#include <algorithm>
#include <sstream>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "rapidcheck.h"
#include "tests/sanitized.h"

namespace dmuond::scheduler::testing {

// A value of [low, high], both included.
inline int64_t Pick(int64_t low, int64_t high) { return *rc::gen::inRange(low, high + 1); }

// Runs `property` on `cases` random inputs, under a sanitizer on fewer. On failure the message has
// the seed and rapidcheck's reproduce string; RC_PARAMS="seed=…" or RC_PARAMS="reproduce=…" replays
// it.
template <typename Property>
void ForAll(int cases, Property&& property) {
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  rc::detail::TestMetadata metadata;
  metadata.id = std::string(info->test_suite_name()) + "/" + info->name();
  metadata.description = info->name();
  rc::detail::TestParams params = rc::detail::configuration().testParams;
  constexpr int kAtLeast = 50;
  params.maxSuccess = std::max(cases / dmuond::testing::kSlowdown, std::min(cases, kAtLeast));
  const auto result = rc::detail::checkTestable(std::forward<Property>(property), metadata, params);
  if (result.template is<rc::detail::SuccessResult>()) return;
  std::ostringstream message;
  rc::detail::printResultMessage(result, message);
  FAIL() << message.str() << "\nreplay with RC_PARAMS=\"seed=" << params.seed << "\"";
}

}  // namespace dmuond::scheduler::testing

#endif  // DMUOND_TESTS_SCHEDULER_PROPERTY_H_
