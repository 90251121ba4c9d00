// Kernels that tests have on a GPU. The fake driver knows them by their names (driver/work.cc).
//   contract_spin(stop, started)   each block stores 1 into its word of `started`, uint64[blocks],
//   and
//                                  computes until the word at `stop` is not 0
//   contract_store(to, value)      stores a word
#pragma once

namespace dmuond::testing {

inline constexpr char kContractKernels[] = R"(
.version 7.0
.target sm_80
.address_size 64
.visible .entry contract_spin(.param .u64 stop, .param .u64 started) {
  .reg .pred %p<2>;
  .reg .b32 %r<2>;
  .reg .b64 %d<6>;
  ld.param.u64 %d1, [stop];
  ld.param.u64 %d2, [started];
  mov.u32 %r1, %ctaid.x;
  mul.wide.u32 %d3, %r1, 8;
  add.u64 %d3, %d2, %d3;
  mov.u64 %d4, 1;
  st.volatile.u64 [%d3], %d4;
again:
  ld.volatile.u64 %d5, [%d1];
  setp.eq.u64 %p1, %d5, 0;
  @%p1 bra again;
  ret;
}
.visible .entry contract_store(.param .u64 to, .param .u64 value) {
  .reg .b64 %d<3>;
  ld.param.u64 %d1, [to];
  ld.param.u64 %d2, [value];
  st.volatile.u64 [%d1], %d2;
  ret;
}
)";

}  // namespace dmuond::testing
