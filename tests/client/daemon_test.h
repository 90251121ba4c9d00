// A test with a daemon of its own, whose log is printed when the test has failed.
//
//   class MyTest : public DaemonTest {
//    protected:
//     void SetUp() override { StartDaemon({.devices = "cpu:2"}); }
#ifndef DMUOND_TESTS_CLIENT_DAEMON_TEST_H_
#define DMUOND_TESTS_CLIENT_DAEMON_TEST_H_

#include <iostream>
#include <memory>
#include <utility>

#include "gtest/gtest.h"
#include "tests/client/daemon_process.h"

namespace dmuond::testing {

class DaemonTest : public ::testing::Test {
 protected:
  void StartDaemon(DaemonProcess::Options options) {
    auto daemon = DaemonProcess::Start(std::move(options));
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  void TearDown() override {
    if (HasFailure() && daemon_ != nullptr) std::cerr << daemon_->Log();
  }

  // It ends after the members of derived classes: a directory that it uses must not be one of them.
  std::unique_ptr<DaemonProcess> daemon_;
};

}  // namespace dmuond::testing

#endif  // DMUOND_TESTS_CLIENT_DAEMON_TEST_H_
