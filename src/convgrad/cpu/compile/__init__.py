"""From IR to machine code: LLVM, a loader, the cache on disk and what is remembered of earlier problems."""
