//! The programs: a few lines of GPU code each, with one line wrong, or right.
//!
//! No stream is ordered by the default stream. Buffers hold COUNT floats.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;

use super::COUNT;
use crate::Version::{self, Right, Wrong};
use crate::blas;
use crate::cuda::{Gpu, Pinned};

pub(super) fn missing_event_wait(version: Version) {
    let gpu = Gpu::new(0);
    let (producer, consumer, filled) = (gpu.stream(), gpu.stream(), gpu.event());
    let buffer = gpu.allocate(COUNT);
    gpu.fill(buffer, 1.0, COUNT, producer);
    gpu.record(filled, producer);
    if version == Right {
        gpu.wait(consumer, filled);
    }
    gpu.add_one(buffer, COUNT, consumer);
    gpu.expect(2.0, buffer, COUNT, consumer);
}

pub(super) fn event_recorded_on_the_wrong_stream(version: Version) {
    let gpu = Gpu::new(0);
    let (producer, consumer, filled) = (gpu.stream(), gpu.stream(), gpu.event());
    let buffer = gpu.allocate(COUNT);
    gpu.fill(buffer, 1.0, COUNT, producer);
    gpu.record(filled, if version == Right { producer } else { consumer });
    gpu.wait(consumer, filled);
    gpu.add_one(buffer, COUNT, consumer);
    gpu.expect(2.0, buffer, COUNT, consumer);
}

pub(super) fn pinned_buffer_reused_too_early(version: Version) {
    let gpu = Gpu::new(0);
    let stream = gpu.stream();
    let (batch, slots) = (
        gpu.pinned(COUNT),
        [gpu.allocate(COUNT), gpu.allocate(COUNT)],
    );
    batch.fill(1.0);
    gpu.upload(slots[0], &batch, stream);
    if version == Right {
        gpu.synchronize(stream);
    }
    batch.fill(2.0);
    gpu.upload(slots[1], &batch, stream);
    gpu.expect(1.0, slots[0], COUNT, stream);
    gpu.expect(2.0, slots[1], COUNT, stream);
}

pub(super) fn pinned_buffer_read_too_early(version: Version) {
    let gpu = Gpu::new(0);
    let (stream, buffer, loss) = (gpu.stream(), gpu.allocate(COUNT), gpu.pinned(COUNT));
    gpu.fill(buffer, 3.0, COUNT, stream);
    gpu.download(&loss, buffer, stream);
    if version == Right {
        gpu.synchronize(stream);
    }
    assert_eq!(loss.get(COUNT - 1), 3.0);
    gpu.synchronize(stream);
}

pub(super) fn use_after_free(version: Version) {
    let gpu = Gpu::new(0);
    let stream = gpu.stream();
    let buffer = gpu.allocate_on(COUNT, stream);
    gpu.fill(buffer, 1.0, COUNT, stream);
    if version == Wrong {
        gpu.free_on(buffer, stream);
    }
    gpu.add_one(buffer, COUNT, stream);
    if version == Right {
        gpu.free_on(buffer, stream);
    }
    gpu.synchronize(stream);
}

pub(super) fn double_free(version: Version) {
    let gpu = Gpu::new(0);
    let stream = gpu.stream();
    let buffer = gpu.allocate_on(COUNT, stream);
    gpu.fill(buffer, 1.0, COUNT, stream);
    gpu.free_on(buffer, stream);
    if version == Wrong {
        gpu.free_on(buffer, stream);
    }
    gpu.synchronize(stream);
}

pub(super) fn out_of_bounds_in_a_kernel(version: Version) {
    let gpu = Gpu::new(0);
    let (stream, buffer) = (gpu.stream(), gpu.allocate(COUNT));
    gpu.fill(buffer, 1.0, COUNT, stream);
    gpu.add_one(
        buffer,
        if version == Right { COUNT } else { COUNT + 1 },
        stream,
    );
    gpu.expect(2.0, buffer, COUNT, stream);
}

pub(super) fn wrong_device_pointer(version: Version) {
    let (first, second) = (Gpu::new(0), Gpu::new(1));
    let (of_first, of_second) = (first.allocate(COUNT), second.allocate(COUNT));
    let stream = second.stream();
    second.fill(of_second, 1.0, COUNT, stream);
    second.add_one(
        if version == Right {
            of_second
        } else {
            of_first
        },
        COUNT,
        stream,
    );
    second.expect(2.0, of_second, COUNT, stream);
}

pub(super) fn peer_copy_without_access(version: Version) {
    let (first, second) = (Gpu::new(0), Gpu::new(1));
    if !second.can_reach(&first) {
        ddp_testing::skip("the devices cannot reach one another");
        return;
    }
    let (filling, copying) = (first.stream(), second.stream());
    let source = first.allocate_on(COUNT, filling);
    first.fill(source, 5.0, COUNT, filling);
    first.synchronize(filling);
    if version == Right {
        second.open_pool_of(&first);
    }
    let target = second.allocate(COUNT);
    second.copy(target, source, COUNT, copying);
    second.expect(5.0, target, COUNT, copying);
}

pub(super) fn call_that_capture_forbids(version: Version) {
    let gpu = Gpu::new(0);
    let (stream, buffer) = (gpu.stream(), gpu.allocate(COUNT));
    gpu.fill(buffer, 1.0, COUNT, stream);
    gpu.prepare_kernels();
    gpu.begin_capture(stream);
    gpu.add_one(buffer, COUNT, stream);
    if version == Wrong {
        gpu.synchronize(stream);
    }
    let graph = gpu.end_capture(stream);
    gpu.launch(graph, stream);
    gpu.launch(graph, stream);
    gpu.expect(3.0, buffer, COUNT, stream);
}

pub(super) fn graph_replayed_after_its_buffer_was_freed(version: Version) {
    let gpu = Gpu::new(0);
    let (stream, buffer) = (gpu.stream(), gpu.allocate(COUNT));
    gpu.fill(buffer, 1.0, COUNT, stream);
    gpu.prepare_kernels();
    gpu.begin_capture(stream);
    gpu.add_one(buffer, COUNT, stream);
    let graph = gpu.end_capture(stream);
    gpu.launch(graph, stream);
    gpu.expect(2.0, buffer, COUNT, stream);
    if version == Wrong {
        gpu.free(buffer);
    }
    gpu.launch(graph, stream);
    gpu.synchronize(stream);
    if version == Right {
        gpu.free(buffer);
    }
}

pub(super) fn workspace_shared_by_two_streams(version: Version) {
    let gpu = Gpu::new(0);
    let blas = blas::Blas::new(&gpu);
    let streams = [gpu.stream(), gpu.stream()];
    let workspaces = [(); 2].map(|()| gpu.allocate(blas::WORKSPACE_BYTES / 4));
    let outputs = [(); 2].map(|()| gpu.allocate(blas::SIDE * blas::SIDE));
    let ones = gpu.allocate(blas::SIDE * blas::SIDE);
    gpu.fill(ones, 1.0, blas::SIDE * blas::SIDE, streams[0]);
    gpu.synchronize(streams[0]);
    blas.square(ones, outputs[0], workspaces[0], streams[0]);
    let own = usize::from(version == Right);
    blas.square(ones, outputs[1], workspaces[own], streams[1]);
    for (output, stream) in outputs.into_iter().zip(streams) {
        gpu.expect(blas::SIDE as f32, output, blas::SIDE * blas::SIDE, stream);
    }
}

/// The host waits for an event that was recorded before the copy instead of after it.
pub(super) fn host_read_without_synchronisation(version: Version) {
    let gpu = Gpu::new(0);
    let (stream, buffer, done) = (gpu.stream(), gpu.allocate(COUNT), gpu.event());
    let result: Pinned = gpu.pinned(COUNT);
    gpu.fill(buffer, 4.0, COUNT, stream);
    if version == Wrong {
        gpu.record(done, stream);
    }
    gpu.download(&result, buffer, stream);
    if version == Right {
        gpu.record(done, stream);
    }
    gpu.synchronize_event(done);
    assert_eq!(result.get(0), 4.0);
    gpu.synchronize(stream);
}

pub(super) fn memory_used_before_it_is_made(version: Version) {
    let gpu = Gpu::new(0);
    let (maker, user, made) = (gpu.stream(), gpu.stream(), gpu.event());
    let buffer = gpu.allocate_on(COUNT, maker);
    gpu.record(made, maker);
    if version == Right {
        gpu.wait(user, made);
    }
    gpu.fill(buffer, 4.0, COUNT, user);
    gpu.expect(4.0, buffer, COUNT, user);
}

pub(super) fn synchronous_upload_still_on_its_way(version: Version) {
    let gpu = Gpu::new(0);
    let (stream, buffer) = (gpu.stream(), gpu.allocate(COUNT));
    gpu.upload_now(buffer, &[1.0; COUNT]);
    if version == Right {
        gpu.synchronize_device();
    }
    gpu.add_one(buffer, COUNT, stream);
    gpu.expect(2.0, buffer, COUNT, stream);
}

/// Batches are copied ahead into two slots in turn. Before a slot is overwritten, the copies wait
/// for an event, which must be recorded after the step that read the slot, not before it.
pub(super) fn batch_slot_reused_too_early(version: Version) {
    let gpu = Gpu::new(0);
    let (copies, compute) = (gpu.stream(), gpu.stream());
    let slots = [(); 2].map(|()| gpu.allocate(COUNT));
    let (arrived, read) = ([(); 2].map(|()| gpu.event()), [(); 2].map(|()| gpu.event()));
    let batches = [0.0, 1.0, 2.0, 3.0].map(|value| {
        let batch = gpu.pinned(COUNT);
        batch.fill(value);
        batch
    });
    for (step, batch) in batches.iter().enumerate() {
        let slot = step % 2;
        if step >= slots.len() {
            gpu.wait(copies, read[slot]);
        }
        gpu.upload(slots[slot], batch, copies);
        gpu.record(arrived[slot], copies);
        gpu.wait(compute, arrived[slot]);
        if version == Wrong {
            gpu.record(read[slot], compute);
        }
        gpu.add_one(slots[slot], COUNT, compute);
        if version == Right {
            gpu.record(read[slot], compute);
        }
    }
    gpu.expect(3.0, slots[0], COUNT, compute);
    gpu.expect(4.0, slots[1], COUNT, compute);
}

pub(super) fn race_that_nobody_waits_for(version: Version) {
    let gpu = Gpu::new(0);
    let (producer, consumer, filled) = (gpu.stream(), gpu.stream(), gpu.event());
    let buffer = gpu.allocate(COUNT);
    gpu.fill(buffer, 1.0, COUNT, producer);
    gpu.record(filled, producer);
    if version == Right {
        gpu.wait(consumer, filled);
    }
    gpu.add_one(buffer, COUNT, consumer);
}

/// One thread waits, and another uses the result: right only if it is told after the wait.
pub(super) fn wait_of_another_thread(version: Version) {
    let gpu = Gpu::new(0);
    let (stream, buffer) = (gpu.stream(), gpu.allocate(COUNT));
    let ((filled, told), (copies, is_told)) = (mpsc::channel(), mpsc::channel());
    let user = std::thread::spawn(move || {
        let gpu = Gpu::new(0);
        let (stream, own) = (gpu.stream(), gpu.allocate(COUNT));
        told.recv().expect("the other thread tells this one");
        gpu.copy(own, buffer, COUNT, stream);
        copies.send(()).expect("the other thread listens");
        gpu.expect(1.0, own, COUNT, stream);
    });
    gpu.fill(buffer, 1.0, COUNT, stream);
    if version == Right {
        gpu.synchronize(stream);
    }
    filled.send(()).expect("the other thread listens");
    // Else a late copy would come after this wait.
    is_told.recv().expect("the other thread tells this one");
    gpu.synchronize(stream);
    user.join().expect("the other thread ends");
}

/// One element more than was written. A maximum hides the NaN that would stand there.
pub(super) fn memory_that_nothing_has_written(version: Version) {
    let gpu = Gpu::new(0);
    let stream = gpu.stream();
    let (values, copied) = (gpu.allocate(COUNT + 1), gpu.allocate(COUNT + 1));
    gpu.fill(values, 1.0, COUNT, stream);
    // Padding may be copied.
    gpu.copy(copied, values, COUNT + 1, stream);
    gpu.largest(copied, COUNT + usize::from(version == Wrong), stream);
    gpu.expect(1.0, copied, 1, stream);
}

pub(super) fn race_after_a_million_accesses(version: Version) {
    let gpu = Gpu::new(0);
    let (stream, buffer) = (gpu.stream(), gpu.allocate(COUNT));
    gpu.fill(buffer, 1.0, COUNT, stream);
    // In odd rounds all threads write the same element.
    gpu.late(buffer, 5000 + usize::from(version == Wrong), stream);
    gpu.expect(0.0, buffer, 1, stream);
}

/// What a compiler may read through the cache must not be written by the same launch, not even by
/// the thread that has read it.
pub(super) fn in_place(version: Version, by_ldg: bool) {
    let gpu = Gpu::new(0);
    let (stream, values, separate) = (gpu.stream(), gpu.allocate(256), gpu.allocate(256));
    gpu.fill(values, 1.0, 256, stream);
    let out = if version == Right { separate } else { values };
    gpu.add_one_to(out, values, by_ldg, stream);
    gpu.expect(2.0, out, 256, stream);
}

/// The address is valid, but not for this pointer.
pub(super) fn index_into_another_allocation(version: Version) {
    let gpu = Gpu::new(0);
    let (stream, values, others) = (gpu.stream(), gpu.allocate(COUNT), gpu.allocate(COUNT));
    gpu.fill(values, 1.0, COUNT, stream);
    gpu.fill(others, 1.0, COUNT, stream);
    let distance = (others.address().wrapping_sub(values.address()) / 4) as usize;
    gpu.add_one_at(
        values,
        if version == Right { 10 } else { distance + 10 },
        stream,
    );
    gpu.expect(2.0, values.after(10), 1, stream);
    gpu.expect(1.0, others, COUNT, stream);
}

/// A host function has the order of its stream, which knows nothing of copies of another.
pub(super) fn host_function_reads_too_early(version: Version) {
    extern "C" fn read(loss: *mut c_void) {
        // SAFETY: `call` gives a Pinned that lives as long as the process.
        let loss = unsafe { &*loss.cast::<Pinned>() };
        READ.store(loss.get(COUNT - 1).to_bits(), Ordering::SeqCst);
    }
    static READ: AtomicU32 = AtomicU32::new(0);
    let gpu = Gpu::new(0);
    let (copies, calls, arrived) = (gpu.stream(), gpu.stream(), gpu.event());
    let (buffer, loss) = (gpu.allocate(COUNT), Box::leak(Box::new(gpu.pinned(COUNT))));
    gpu.fill(buffer, 3.0, COUNT, copies);
    gpu.download(loss, buffer, copies);
    gpu.record(arrived, copies);
    if version == Right {
        gpu.wait(calls, arrived);
    }
    gpu.call(read, loss, calls);
    gpu.synchronize(calls);
    gpu.synchronize_device();
    assert_eq!(READ.load(Ordering::SeqCst), 3.0_f32.to_bits());
}

pub(super) fn memory_never_freed(version: Version) {
    let gpu = Gpu::new(0);
    let (stream, buffer) = (gpu.stream(), gpu.allocate(COUNT));
    gpu.fill(buffer, 1.0, COUNT, stream);
    gpu.synchronize(stream);
    if version == Right {
        gpu.free(buffer);
    }
}
