// Part of runtime.cpp: stacks that take turns. A switch saves what the ABI wants preserved and nothing else.
#pragma once

namespace simcuda {

#if defined(__x86_64__)

struct Context {
    void* stack_pointer;
};

extern "C" void simcuda_switch(void** save, void* load) __attribute__((visibility("hidden")));
__asm__(
    ".text\n.hidden simcuda_switch\n.globl simcuda_switch\n.type simcuda_switch,@function\nsimcuda_switch:\n"
    " push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    " mov %rsp,(%rdi)\n mov %rsi,%rsp\n"
    " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n"
    ".size simcuda_switch,.-simcuda_switch\n");

static void prepare(Context* context, u8* low, u8* high, void (*entry)()) {
    (void)low;
    void** top = reinterpret_cast<void**>(high) - 2;
    *--top = nullptr;                            // where entry would return to: it never does
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;  // the saved registers
    context->stack_pointer = top;
}

static inline void switch_to(Context* from, Context* to) { simcuda_switch(&from->stack_pointer, to->stack_pointer); }

#else

struct Context {
    ucontext_t saved;
};

static void prepare(Context* context, u8* low, u8* high, void (*entry)()) {
    getcontext(&context->saved);
    context->saved.uc_stack.ss_sp = low;
    context->saved.uc_stack.ss_size = static_cast<size_t>(high - low);
    context->saved.uc_link = nullptr;
    makecontext(&context->saved, entry, 0);
}

static inline void switch_to(Context* from, Context* to) { swapcontext(&from->saved, &to->saved); }

#endif

}  // namespace simcuda
