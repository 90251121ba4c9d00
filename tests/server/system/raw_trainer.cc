#include "tests/server/system/raw_trainer.h"

#include "absl/strings/str_cat.h"

namespace dmuond::testing {

RawTrainer::RawTrainer(const std::string& address) : ProtocolTrainer(address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetString(GRPC_ARG_DEFAULT_AUTHORITY, "localhost");
  arguments.SetMaxSendMessageSize(-1);
  stub_ = v1::Trainer::NewStub(grpc::CreateCustomChannel(
      absl::StrCat("unix:", address), grpc::InsecureChannelCredentials(), arguments));
}

absl::Status RawTrainer::Call(const v1::PushParametersRequest& request,
                              v1::PushParametersReply* reply) {
  grpc::ClientContext context;
  const auto writer = stub_->PushParameters(&context, reply);
  writer->Write(request);
  writer->WritesDone();
  return server::FromGrpc(writer->Finish());
}

}  // namespace dmuond::testing
