// What the three sides share: the kernels (language.h), the runtime linked to each kernel library (runtime.cpp), and the
// simulator that loads the library (src/kernel/library.rs, which repeats these structures field for field).
#pragma once

namespace simcuda {

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 abi_version = 6;
constexpr u32 threads_max = 1024;                 // of one block
constexpr u32 warp_lanes = 32;
constexpr u32 shared_words_max = 8;               // that a lane gives to the others of its warp at once
constexpr u32 dynamic_shared_bytes_max = 232448;  // 227 KiB, the limit of compute capability 9.0
constexpr u32 static_shared_bytes_max = 49152;
constexpr u32 shared_margin_bytes = 4096;         // on both sides of a static shared variable, for nobody

// Memory in which accesses are followed: an allocation, or a piece of shared memory.
struct Window {
    u64 low;
    u64 length_bytes;
    u64* marks;  // 4 words for every 64 bytes of memory: a bit a byte for read, written, atomic, known to be written. Null: shared.
    u8* pages;   // one for every 4,096 bytes: whether any mark is set there
    u64* cells;  // 2 for every byte of memory: who wrote it last, who read it. Null: races inside the launch are not looked for.
                 // Behind them 2 for every 4 bytes: from which site.
    u64* read_marks;  // the same, or null if some of the memory was never written before this launch: each read is a question
};

// So many words are the cells and sites of a window.
constexpr u64 cells_of(u64 bytes) { return 2 * bytes + 2 * (bytes / 4 + 1); }

enum Kind : u32 { READ = 0, WRITE = 1, ATOMIC = 2 };

enum FailureKind : u32 {
    NONE = 0,
    ADDRESS = 1,         // touches what it must not
    MISALIGNED = 2,
    RACE = 3,            // two threads of one launch, nothing between them
    BARRIER = 4,         // __syncthreads that some threads of the block do not reach
    WARP = 5,            // a warp function that some lanes of its mask do not reach, or cannot
    TRAP = 6,
    ASSERT = 7,
    UNWRITTEN = 8,       // reads device memory that nothing has written
    INDEX = 9,           // an index outside of its array
    COPY = 10,           // touches what a copy that was started is going to write
};

// The first thing that went wrong; the launch is left there.
struct Failure {
    u32 kind;
    u32 access;          // Kind of the access that failed
    u64 address;
    u64 size_bytes;
    u64 site;            // code address behind the access, as an offset into the library
    u32 thread;          // in the block
    u32 line;            // of the source, where it is known
    u64 block;           // in the grid
    u32 other_thread;    // the other side of a race, or who copies; threads_max: several threads of that block; threads_max + 1: of several blocks
    u32 other_access;
    u64 other_block;
    u64 other_site;      // as `site`; 0: not known
    u64 arrived;         // BARRIER: threads that wait
    const char* text;    // ASSERT: the expression; WARP: what is wrong; INDEX: the array's type
};

struct Span {
    u8* begin;
    u8* end;
};

// One kernel of a library.
struct Kernel {
    const char* name;
    void (*call)(void** arguments);     // runs one thread
    const u32* argument_bytes;
    const u32* argument_alignments;
    u32 arguments;
    u32 threads_max;                    // __launch_bounds__, or 1,024
    const char* groups;                 // of static shared memory that it can reach, with spaces between them
    u64 cached;                         // a bit for each argument that is a `const T* __restrict__`
    u64 holds_pointers;                 // 1 if memory behind an argument may hold pointers
};

// One launch, filled by the simulator.
struct Launch {
    const Kernel* kernel;
    void** arguments;
    u32 grid[3];
    u32 block[3];
    u32 dynamic_shared_bytes;
    u32 intra;                           // 1: look for races between the threads of this launch
    u64 intra_accesses_max;              // and stop looking after so many accesses
    u64 seed;
    u32 first_serial;                    // blocks of all launches are numbered: this launch's first, at least 1
    u32 spare;
    const Span* shared;                  // the static shared memory of the kernel
    u64 shared_spans;
    u64* shared_cells;                   // for the static spans in their order, then the dynamic memory
    u8* stacks;                          // threads_max of them, downwards from the end of each
    u64 stack_bytes;
    // Device memory is mapped several times: an address in any view, and in view 0, are multiples of view_bytes apart.
    u64 views_low;
    u64 views_bytes;                     // of all views, of which the last is of __ldg
    u64 view_bytes;
    void* context;
    // The allocation that holds `address`. 0: there is none that this device may touch.
    u32 (*find)(void* context, u64 address, Window* window);
    // Up to where all bytes from `address` to `end`, of one allocation, were written before this launch.
    u64 (*written_until)(void* context, u64 address, u64 end);
    Failure failure;
    Failure unwritten;                   // the first read of memory that nothing has written: the launch goes on
    u64 accesses;                        // counted only while `intra` is on
};

struct Library {
    u32 version;
    u32 kernels;
    const Kernel* const* kernel;
    void (*run)(Launch* launch);
    u8 *begin, *end;                     // of the library in memory
    u8* dynamic_shared;
    const char* shared_uses;             // a line `FILE:LINE NAME` for each use of a static shared variable
};

}  // namespace simcuda

// What kernels call; runtime.cpp defines it. Hidden: every library has its own.
#pragma GCC visibility push(hidden)
extern "C" {
extern unsigned char simcuda_dynamic_shared[simcuda::dynamic_shared_bytes_max];
unsigned simcuda_barrier(unsigned line, unsigned operation, unsigned value);
unsigned long long simcuda_warp(unsigned line, unsigned operation, unsigned mask, unsigned source, unsigned long long value);
// Each lane of a warp gives `count` words; all get the words of all. They stay until the lane's next call but one.
const unsigned (*simcuda_share(unsigned line, const unsigned* words, unsigned count))[simcuda::shared_words_max];
unsigned simcuda_active_mask();
unsigned simcuda_lane();
unsigned char* simcuda_shared_pointer(unsigned address);
void simcuda_read(const void* pointer, unsigned size_bytes, void* site);
void simcuda_start_copy(unsigned to, const void* from, unsigned size_bytes, unsigned bytes, void* site);
void simcuda_end_group();
void simcuda_wait_for_copies(unsigned pending);
void simcuda_atomic(void* pointer, unsigned long size_bytes);
void simcuda_order(void* pointer, bool is_change);
void simcuda_fence();
const void* simcuda_cached(const void* pointer, unsigned long size_bytes);
void* simcuda_memcpy(void* to, const void* from, unsigned long size_bytes);
void* simcuda_memset(void* to, int value, unsigned long size_bytes);
unsigned long long simcuda_clock();
[[noreturn]] void simcuda_trap(unsigned line);
[[noreturn]] void simcuda_assert(const char* expression, unsigned line);
}
#pragma GCC visibility pop

namespace simcuda {
enum BarrierOperation : u32 { BARRIER_PLAIN, BARRIER_AND, BARRIER_OR, BARRIER_COUNT };
enum WarpOperation : u32 { WARP_SYNC, WARP_SHUFFLE, WARP_BALLOT, WARP_MATCH, WARP_ADD, WARP_MIN, WARP_MAX, WARP_MIN_SIGNED, WARP_MAX_SIGNED, WARP_AND, WARP_OR, WARP_XOR, WARP_SHARE };
}  // namespace simcuda
