// The runtime that each kernel library carries: the threads of a block as fibers, warps, barriers, and the order in which all
// of it runs. Compiled without the sanitizer. One launch at a time, on one host thread.
//
// Orders come from the seed of the launch: blocks forward, backward or scattered; threads of a block too; and whether threads
// that may go on do so before new ones start. A fiber runs threads one after another until one has to wait, so a kernel
// without barriers needs one fiber.

#include <elf.h>
#include <initializer_list>
#include <stdlib.h>
#include <string.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include "runtime.h"
#include "fiber.h"
#include "access.h"

namespace simcuda {

enum State : u8 { UNSTARTED, RUNNING, IN_WARP, IN_BARRIER, EXITED };

struct Thread {
    State state;
    u32 fiber;
    u32 line;
    u32 operation;
    u32 mask;
    u32 source;
    u64 value;   // what it brings to a warp function or barrier, then what it gets
};

struct Fiber {
    Context context;
    u8 *low, *high;
};

enum Order : u32 { FORWARD, BACKWARD, SCATTERED };

static Context scheduler;
static Fiber fibers[threads_max];
static u32 fibers_made, free_fibers[threads_max], fibers_free, fiber_now;
static Thread threads[threads_max];
static Index indices[threads_max];       // threadIdx of each
static u32 start_order[threads_max];
static u32 threads_of_block, started, exited, waiting_at_barrier;
static u32 ready[threads_max], ready_first, ready_count;  // a ring
static Order thread_order;
static bool starts_all_first;
static bool failed;
static u64 random_state;
static u64 clock_now;
// What lanes give each other, by turns: a lane may come to its next call while others still read.
static u32 shared_words[2][threads_max][shared_words_max];
static u8 shared_turn[threads_max];

static u64 next_random() {
    random_state += 0x9e3779b97f4a7c15ull;
    u64 mixed = random_state;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9ull;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebull;
    return mixed ^ mixed >> 31;
}

[[noreturn]] static void leave(const Failure& failure) {
    if (!failed) launch->failure = failure;
    failed = true;
    switch_to(&fibers[fiber_now].context, &scheduler);
    __builtin_unreachable();
}

}  // namespace simcuda

#pragma GCC visibility push(hidden)
extern "C" {
alignas(1024) unsigned char simcuda_dynamic_shared[simcuda::dynamic_shared_bytes_max];
// The kernels see these as constants: they are, for as long as one thread looks.
simcuda::Index threadIdx, blockIdx, blockDim, gridDim;
}
#pragma GCC visibility pop

namespace simcuda {

}  // namespace simcuda

#include "copies.h"

namespace simcuda {

// ---- threads ----

static void become(u32 thread) {
    thread_now = thread;
    threads[thread].state = RUNNING;
    threadIdx = indices[thread];
}

static void to_scheduler() { switch_to(&fibers[fiber_now].context, &scheduler); }

static void fiber_main() {
    for (;;) {
        while (started < threads_of_block && (starts_all_first || ready_count == 0)) {
            u32 thread = start_order[started++];
            threads[thread].fiber = fiber_now;
            become(thread);
            launch->kernel->call(launch->arguments);
            threads[thread_now].state = EXITED;
            exited++;
        }
        free_fibers[fibers_free++] = fiber_now;
        to_scheduler();
    }
}

static void enter_fiber(u32 fiber) {
    fiber_now = fiber;
    stack_low = fibers[fiber].low;
    stack_high = fibers[fiber].high;
    switch_to(&scheduler, &fibers[fiber].context);
}

static u32 take_fiber() {
    if (fibers_free) return free_fibers[--fibers_free];
    u32 number = fibers_made++;
    Fiber* fiber = &fibers[number];
    fiber->low = launch->stacks + number * launch->stack_bytes;
    // Tops are spread over cache lines: threads at one barrier would all compete for the same few.
    fiber->high = fiber->low + launch->stack_bytes - number * 5 % 61 * 192;
    prepare(&fiber->context, fiber->low, fiber->high, fiber_main);
    return number;
}

static void make_ready(u32 thread) {
    threads[thread].state = RUNNING;
    ready[(ready_first + ready_count++) % threads_max] = thread;
}

static u32 pick_ready() {
    u32 place = 0;
    if (thread_order == BACKWARD) place = ready_count - 1;
    if (thread_order == SCATTERED) place = static_cast<u32>(next_random() % ready_count);
    u32 first = ready_first % threads_max, chosen = (ready_first + place) % threads_max;
    u32 thread = ready[chosen];
    if (place == ready_count - 1) {
        ready_count--;
        return thread;
    }
    ready[chosen] = ready[first];
    ready_first = (ready_first + 1) % threads_max;
    ready_count--;
    return thread;
}

// Waits in the scheduler; what the thread gets is in its value.
static u64 wait(State state) {
    u32 thread = thread_now;
    threads[thread].state = state;
    threads[thread].fiber = fiber_now;
    to_scheduler();
    become(thread);
    return threads[thread].value;
}

// ---- barriers ----

// All threads that have not returned wait at one barrier.
static void release_barrier() {
    u32 nonzero = 0;
    for (u32 t = 0; t < threads_of_block; t++) nonzero += threads[t].state == IN_BARRIER && threads[t].value != 0;
    for (u32 t = 0; t < threads_of_block; t++) {
        if (threads[t].state != IN_BARRIER) continue;
        switch (threads[t].operation) {
            case BARRIER_AND: threads[t].value = nonzero == waiting_at_barrier; break;
            case BARRIER_OR: threads[t].value = nonzero != 0; break;
            default: threads[t].value = nonzero;
        }
        make_ready(t);
    }
    waiting_at_barrier = 0;
    if (++block_epoch > block_epoch_max) intra = false;
    // A barrier of the block is one of every warp, too.
    memset(warp_epoch, 0, threads_of_block * sizeof *warp_epoch);
    if (fences_made > first_fence_of_block) memset(fence_epoch, 0, threads_of_block);
}

static bool is_one_barrier() {
    u32 first = threads_of_block;
    for (u32 t = 0; t < threads_of_block; t++) {
        if (threads[t].state != IN_BARRIER) continue;
        if (first == threads_of_block) first = t;
        if (threads[t].line != threads[first].line || threads[t].operation != threads[first].operation) return false;
    }
    return true;
}

// ---- warps ----

static u32 lanes_of(u32 warp) {
    u32 lanes = threads_of_block - warp * warp_lanes;
    return lanes >= warp_lanes ? ~0u : (1u << lanes) - 1;
}

static void warp_failure(u32 thread, const char* text) {
    thread_now = thread;
    Failure failure = failure_here(WARP, nullptr);
    failure.line = threads[thread].line;
    failure.text = text;
    if (!failed) launch->failure = failure;
    failed = true;
}

static bool combine(u32 first, u32 mask) {
    Thread* lanes = &threads[first];
    u32 operation = lanes[__builtin_ctz(mask)].operation;
    u64 results[warp_lanes];
    u64 total = 0;
    bool is_first = true;
    for (u32 lane = 0; lane < warp_lanes; lane++) {
        if (!(mask >> lane & 1)) continue;
        u64 value = lanes[lane].value;
        u32 low = static_cast<u32>(value), so_far = static_cast<u32>(total);
        switch (operation) {
            case WARP_BALLOT: total |= static_cast<u64>(value != 0) << lane; break;
            case WARP_ADD: total = static_cast<u32>(so_far + low); break;
            case WARP_MIN: total = is_first || low < so_far ? low : so_far; break;
            case WARP_MAX: total = is_first || low > so_far ? low : so_far; break;
            case WARP_MIN_SIGNED: total = is_first || static_cast<int>(low) < static_cast<int>(so_far) ? low : so_far; break;
            case WARP_MAX_SIGNED: total = is_first || static_cast<int>(low) > static_cast<int>(so_far) ? low : so_far; break;
            case WARP_AND: total = is_first ? low : so_far & low; break;
            case WARP_OR: total = so_far | low; break;
            case WARP_XOR: total = so_far ^ low; break;
            default: break;
        }
        is_first = false;
    }
    for (u32 lane = 0; lane < warp_lanes; lane++) {
        if (!(mask >> lane & 1)) continue;
        results[lane] = total;
        if (operation == WARP_SHUFFLE) {
            if (!(mask >> lanes[lane].source & 1)) {
                warp_failure(first + lane, "reads from a lane that is not in its mask, or not in the block");
                return false;
            }
            results[lane] = lanes[lanes[lane].source].value;
        }
        if (operation == WARP_MATCH) {
            results[lane] = 0;
            for (u32 other = 0; other < warp_lanes; other++)
                if ((mask >> other & 1) && lanes[other].value == lanes[lane].value) results[lane] |= 1ull << other;
        }
    }
    for (u32 lane = 0; lane < warp_lanes; lane++)
        if (mask >> lane & 1) lanes[lane].value = results[lane];
    return true;
}

// Lets the lanes of a warp go on if all that the running thread's mask names have come to the same function.
static void release_warp(u32 thread) {
    u32 first = thread / warp_lanes * warp_lanes;
    u32 mask = threads[thread].mask & lanes_of(thread / warp_lanes);
    for (u32 lane = 0; lane < warp_lanes; lane++) {
        if (!(mask >> lane & 1)) continue;
        const Thread& other = threads[first + lane];
        if (other.state != IN_WARP || other.operation != threads[thread].operation || other.mask != threads[thread].mask) return;
    }
    if (!combine(first, mask)) return;
    for (u32 lane = 0; lane < warp_lanes; lane++) {
        if (!(mask >> lane & 1)) continue;
        if (threads[thread].operation == WARP_SYNC && ++warp_epoch[first + lane] > warp_epoch_max) intra = false;
    }
    for (u32 lane = 0; lane < warp_lanes; lane++)
        if (mask >> lane & 1) make_ready(first + lane);
}

// Nobody can go on and somebody waits: says who does not come.
static void report_stall() {
    u32 in_barrier = threads_of_block;
    for (u32 t = 0; t < threads_of_block; t++) {
        if (threads[t].state == IN_BARRIER) in_barrier = t;
        if (threads[t].state != IN_WARP) continue;
        u32 first = t / warp_lanes * warp_lanes;
        const char* text = "waits for a lane of its mask that is at another function or has another mask";
        for (u32 lane = 0; lane < warp_lanes; lane++)
            if ((threads[t].mask & lanes_of(t / warp_lanes)) >> lane & 1)
                if (threads[first + lane].state == EXITED) text = "waits for a lane of its mask that has returned from the kernel";
        return warp_failure(t, text);
    }
    thread_now = in_barrier;
    Failure failure = failure_here(BARRIER, nullptr);
    failure.line = threads[in_barrier].line;
    failure.arrived = waiting_at_barrier;
    for (u32 t = 0; t < threads_of_block; t++) {
        if (threads[t].state == IN_BARRIER && threads[t].line != failure.line) failure.other_thread = t, failure.other_access = threads[t].line;
    }
    launch->failure = failure;
    failed = true;
}

// ---- blocks ----

static void order_threads() {
    for (u32 i = 0; i < threads_of_block; i++) start_order[i] = thread_order == BACKWARD ? threads_of_block - 1 - i : i;
    if (thread_order != SCATTERED) return;
    for (u32 i = threads_of_block - 1; i > 0; i--) {
        u32 other = static_cast<u32>(next_random() % (i + 1)), kept = start_order[i];
        start_order[i] = start_order[other];
        start_order[other] = kept;
    }
}

static void begin_block() {
    started = exited = waiting_at_barrier = ready_first = ready_count = 0;
    block_epoch = 0;
    memset(warp_epoch, 0, threads_of_block * sizeof *warp_epoch);
    memset(fence_epoch, 0, threads_of_block);
    for (u32 t = 0; t < threads_of_block; t++) threads[t].state = UNSTARTED;
    // What a block has not written in its shared memory is garbage.
    for (u64 i = 0; i < launch->shared_spans; i++)
        memset(launch->shared[i].begin, 0xff, static_cast<size_t>(launch->shared[i].end - launch->shared[i].begin));
    memset(simcuda_dynamic_shared, 0xff, launch->dynamic_shared_bytes);
    forget_copies();
    memset(shared_turn, 0, sizeof shared_turn);
    begin_block_order();
    if (thread_order == SCATTERED) order_threads();
}

static void run_block() {
    begin_block();
    while (!failed) {
        bool can_start = started < threads_of_block;
        if (can_start && (starts_all_first || ready_count == 0)) {
            enter_fiber(take_fiber());
        } else if (ready_count) {
            enter_fiber(threads[pick_ready()].fiber);
        } else if (exited == threads_of_block) {
            return;
        } else if (waiting_at_barrier && waiting_at_barrier + exited == threads_of_block && is_one_barrier()) {
            // Threads that have returned count as arrived, from sm_70 on.
            release_barrier();
        } else {
            report_stall();
        }
    }
}

// ---- launches ----

static u64 greatest_common_divisor(u64 a, u64 b) {
    while (b) {
        u64 rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static void add_shared_windows() {
    u64* cells = launch->shared_cells;
    for (u64 i = 0; i <= launch->shared_spans; i++) {
        bool is_static = i < launch->shared_spans;
        u8* begin = is_static ? launch->shared[i].begin : simcuda_dynamic_shared;
        u64 length = is_static ? static_cast<u64>(launch->shared[i].end - begin) : launch->dynamic_shared_bytes;
        if (!length) continue;
        Window window = {reinterpret_cast<u64>(begin), length, nullptr, nullptr, cells, nullptr};
        add_window(window);
        if (cells) cells += cells_of(length);
    }
}

static void begin_launch(Launch* given) {
    launch = given;
    failed = false;
    intra = launch->intra;
    intra_accesses_left = launch->intra_accesses_max;
    random_state = launch->seed;
    fibers_made = fibers_free = 0;
    windows_used = windows_replaced = 0;
    for (u32 i = 0; i < 256; i++) window_of_site[i] = &no_window;
    threads_of_block = launch->block[0] * launch->block[1] * launch->block[2];
    for (u32 t = 0; t < threads_of_block; t++)
        indices[t] = {t % launch->block[0], t / launch->block[0] % launch->block[1], t / launch->block[0] / launch->block[1]};
    blockDim = {launch->block[0], launch->block[1], launch->block[2]};
    gridDim = {launch->grid[0], launch->grid[1], launch->grid[2]};
    thread_order = static_cast<Order>(next_random() % 3);
    starts_all_first = next_random() & 1;
    order_threads();
    add_shared_windows();
}

static void run(Launch* given) {
    begin_launch(given);
    u64 blocks = static_cast<u64>(launch->grid[0]) * launch->grid[1] * launch->grid[2];
    begin_launch_order();
    Order block_order = static_cast<Order>(next_random() % 3);
    // Scattered: i * step + offset runs through all blocks once, since step and their number have no common divisor.
    u64 step = block_order == SCATTERED ? next_random() % blocks | 1 : 1;
    while (greatest_common_divisor(step, blocks) != 1) step++;
    u64 offset = block_order == SCATTERED ? next_random() % blocks : 0;
    step %= blocks;
    for (u64 i = 0; i < blocks && !failed; i++) {
        block_now = block_order == BACKWARD ? blocks - 1 - i
                                            : static_cast<u64>((static_cast<unsigned __int128>(i) * step + offset) % blocks);
        serial_now = launch->first_serial + static_cast<u32>(i);
        blockIdx = {static_cast<u32>(block_now % launch->grid[0]), static_cast<u32>(block_now / launch->grid[0] % launch->grid[1]),
                    static_cast<u32>(block_now / launch->grid[0] / launch->grid[1])};
        run_block();
    }
    launch->accesses = launch->intra_accesses_max - intra_accesses_left;
    if (launch->failure.kind != RACE) return;
    u64 place = launch->failure.other_block;
    launch->failure.other_block = block_order == BACKWARD ? blocks - 1 - place
                                                          : static_cast<u64>((static_cast<unsigned __int128>(place) * step + offset) % blocks);
}

}  // namespace simcuda

// ---- what kernels call ----

using namespace simcuda;

#pragma GCC visibility push(hidden)
extern "C" {

void simcuda_run(Launch* launch) { run(launch); }

unsigned simcuda_barrier(unsigned line, unsigned operation, unsigned value) {
    Thread& thread = threads[thread_now];
    thread.line = line;
    thread.operation = operation;
    thread.value = value;
    waiting_at_barrier++;
    return static_cast<unsigned>(wait(IN_BARRIER));
}

unsigned long long simcuda_warp(unsigned line, unsigned operation, unsigned mask, unsigned source, unsigned long long value) {
    Thread& thread = threads[thread_now];
    thread.line = line;
    thread.operation = operation;
    thread.mask = mask;
    thread.source = source;
    thread.value = value;
    if (!(mask >> thread_now % warp_lanes & 1)) {
        Failure failure = failure_here(WARP, nullptr);
        failure.line = line;
        failure.text = "calls a warp function with a mask that does not name the calling lane";
        leave(failure);
    }
    thread.state = IN_WARP;
    release_warp(thread_now);
    if (failed) to_scheduler();
    // The last to come is ready like the others, and takes its turn.
    thread.fiber = fiber_now;
    u32 number = thread_now;
    to_scheduler();
    become(number);
    return threads[number].value;
}

const unsigned (*simcuda_share(unsigned line, const unsigned* words, unsigned count))[shared_words_max] {
    u32 thread = thread_now, turn = shared_turn[thread] ^= 1;
    memcpy(shared_words[turn][thread], words, count * sizeof *words);
    simcuda_warp(line, WARP_SHARE, ~0u, 0, count);
    return &shared_words[turn][thread / warp_lanes * warp_lanes];
}

unsigned char* simcuda_shared_pointer(unsigned address) { return simcuda_dynamic_shared + static_cast<int>(address); }

void simcuda_read(const void* pointer, unsigned size_bytes, void* site) {
    u64 address = reinterpret_cast<u64>(pointer);
    if (address & (size_bytes - 1)) misaligned(address, size_bytes, READ, site);
    access_range(address, size_bytes, READ, site);
}

void simcuda_start_copy(unsigned to, const void* from, unsigned size_bytes, unsigned bytes, void* site) {
    start_copy(simcuda_shared_pointer(to), static_cast<const u8*>(from), size_bytes, bytes, site);
}
void simcuda_end_group() { groups_ended[thread_now]++; }
void simcuda_wait_for_copies(unsigned pending) { wait_for_copies(pending); }

unsigned simcuda_active_mask() {
    // Threads run one at a time: which of a warp are "active" together is not defined, so the least is answered.
    return 1u << thread_now % warp_lanes;
}

unsigned simcuda_lane() { return thread_now % warp_lanes; }

unsigned long long simcuda_clock() { return ++clock_now; }

void simcuda_trap(unsigned line) {
    Failure failure = failure_here(TRAP, nullptr);
    failure.line = line;
    leave(failure);
}

void simcuda_assert(const char* expression, unsigned line) {
    Failure failure = failure_here(ASSERT, nullptr);
    failure.line = line;
    failure.text = expression;
    leave(failure);
}
}
#pragma GCC visibility pop
