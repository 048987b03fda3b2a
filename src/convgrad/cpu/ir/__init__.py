"""Writing LLVM IR: the builder, conversions between element types, and shuffles of vectors."""
