// dmuonctl doctor
#include <algorithm>
#include <iostream>
#include <vector>

#include "server/ctl/checks.h"
#include "server/ctl/command.h"
#include "server/ctl/surroundings.h"
#include "server/ctl/table.h"
#include "server/ctl/to_json.h"

namespace dmuond::server::ctl {
namespace {

std::vector<Finding> CheckAll(const Options& options) {
  const Surroundings around = LookAround(options.address);
  std::vector<Finding> findings = {CheckKernel(),          CheckMemfd(),        CheckCores(),
                                   CheckCoreType(),        CheckMemory(around), CheckHugePages(),
                                   CheckDescriptorLimit(), CheckPrograms()};
  findings.push_back(CheckNamespaces(around));
  for (Finding& finding :
       CheckGpus(around, options.lane_binary.empty() ? LaneBeside() : options.lane_binary,
                 options.gpu_timeout)) {
    findings.push_back(std::move(finding));
  }
  findings.push_back(CheckSocketDirectory(options.address));
  findings.push_back(CheckSocket(options.address));
  if (findings.back().verdict != Verdict::kOk) return findings;
  for (Finding& finding : CheckDaemon(options.address, options.timeout)) {
    findings.push_back(std::move(finding));
  }
  return findings;
}

void Print(const std::vector<Finding>& findings) {
  Table table({"", "", ""});
  for (const Finding& finding : findings) {
    table.Add({Name(finding.verdict), finding.what, finding.detail});
    if (!finding.remedy.empty()) table.Add({"", "", "→ " + finding.remedy});
  }
  const std::string text = table.Text();
  std::cout << text.substr(text.find('\n') + 1);  // without the empty header
}

}  // namespace

const char* Name(Verdict verdict) {
  switch (verdict) {
    case Verdict::kOk:
      return "ok";
    case Verdict::kWarn:
      return "warn";
    case Verdict::kFail:
      return "fail";
  }
  return "fail";
}

int RunDoctor(const Options& options, const Arguments& arguments) {
  if (!arguments.empty()) return FailUsage("doctor takes no arguments");
  const std::vector<Finding> findings = CheckAll(options);
  if (options.json) {
    Json json = Json::array();
    for (const Finding& finding : findings) {
      json.push_back({{"verdict", Name(finding.verdict)},
                      {"what", finding.what},
                      {"detail", finding.detail},
                      {"remedy", finding.remedy}});
    }
    PrintJson(json);
  } else {
    Print(findings);
  }
  const bool failed = std::any_of(findings.begin(), findings.end(), [](const Finding& finding) {
    return finding.verdict == Verdict::kFail;
  });
  return failed ? kExitFailed : kExitOk;
}

}  // namespace dmuond::server::ctl
