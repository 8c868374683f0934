/* How a kernel that fails to launch says so, for runtime libraries that cannot: nvidia-cutlass-dsl before 4.8.

   Kernels exported by 4.8 call a function of the runtime library for it. A bundle brings this one along; it is weak, and
   the runtime library's own, where there is one, comes before it in the order in which symbols are looked up. */

typedef void (*set_raised)(const char *kind, const char **parts, int count);

/* Raises `code` through apache-tvm-ffi; 0 is no error. set: TVMFFIErrorSetRaisedFromCStrParts. */
__attribute__((weak)) void CuteDSLRT_TVMFFISetRaisedCudaError(set_raised set, int code) {
  char digits[12];
  char *first = digits + sizeof(digits) - 1;
  unsigned rest = code < 0 ? -(unsigned)code : (unsigned)code;
  const char *parts[2];
  if (code == 0) return;
  *first = 0;
  do {
    *--first = (char)('0' + rest % 10);
    rest /= 10;
  } while (rest != 0);
  if (code < 0) *--first = '-';
  parts[0] = "CUDA Error Code: ";
  parts[1] = first;
  set("CUDADialectError", parts, 2);
}
