// DMUOND_CLONES before a function: the compiler makes one copy per instruction set and the loader
// picks the widest that this processor has.
//
// All copies give the same bits: this folder is compiled without contraction of a*b+c and without
// reassociation, so each element sees the same IEEE operations in every copy.
//
// Sanitizers cannot run the loader's choice (it comes before their own start): one copy there.
#ifndef DMUOND_KERNELS_CPU_CLONES_H_
#define DMUOND_KERNELS_CPU_CLONES_H_

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define DMUOND_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define DMUOND_CLONES
#endif

#endif  // DMUOND_KERNELS_CPU_CLONES_H_
