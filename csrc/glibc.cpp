// Names that a newer C library would put a newer version on. Defined here they are found inside the library, so that a
// wheel that is built on today's machine loads beside glibc 2.28, as torch's own wheels do (manylinux_2_28).
#if defined(__x86_64__) && defined(__linux__)

extern "C" {

// The same function before 2.29 gave it a second version, for callers that don't set errno.
double sassha_pow(double base, double exponent);
__asm__(".symver sassha_pow, pow@GLIBC_2.2.5");
__asm__(".hidden pow");  // an attribute would come too late: the compiler knows this function
double pow(double base, double exponent) { return sassha_pow(base, exponent); }

// Asked by std::shared_ptr, from 2.32 on, whether it may count without atomic operations: never.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

#endif
