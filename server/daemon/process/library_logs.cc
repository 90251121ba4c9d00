#include "server/daemon/process/library_logs.h"

#include <string>

#include "google/protobuf/stubs/logging.h"
#include "grpc/support/log.h"
#include "server/common/log.h"

namespace dmuond::server {
namespace {

// An error of a library is a warning here: it concerns one connection or message, and whoever made
// the call hears of it by its status.
void FromGrpcCore(gpr_log_func_args* said) {
  const log::Level level = said->severity == GPR_LOG_SEVERITY_ERROR  ? log::Level::kWarn
                           : said->severity == GPR_LOG_SEVERITY_INFO ? log::Level::kInfo
                                                                     : log::Level::kDebug;
  log::Write(level, said->message,
             {{"library", "grpc"}, {"file", said->file}, {"line", said->line}});
}

void FromProtobuf(google::protobuf::LogLevel severity, const char* file, int line,
                  const std::string& message) {
  const log::Level level =
      severity == google::protobuf::LOGLEVEL_INFO ? log::Level::kInfo : log::Level::kWarn;
  log::Write(level, message, {{"library", "protobuf"}, {"file", file}, {"line", line}});
}

}  // namespace

void LogForLibraries() {
  gpr_set_log_function(FromGrpcCore);
  google::protobuf::SetLogHandler(FromProtobuf);
}

}  // namespace dmuond::server
