//! The nodes of a captured graph, and the bytes that each moves, computed from the operands of its
//! operation. They are noted while a thread captures, for `bench --explain`.

use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::ptr;

use cudarc::driver::sys::{CUgraph, CUgraphNode};

use super::calls::{Outcome, driver};
use super::queue::{Mark, Queue, is_capturing};
use crate::named;

named! {
    /// What kind of work a node is.
    pub enum NodeKind {
        /// A kernel of this crate.
        Kernel = "kernel",
        /// A matmul of cuBLASLt, which may be several kernels.
        Matmul = "matmul",
        /// A copy within the device.
        Copy = "copy",
        /// A fill with zeros.
        Fill = "fill",
        /// A call of another library, such as NCCL.
        Foreign = "library",
    }
}

/// A node of a graph. Bytes are those of its operands, each once: caches are not modelled.
#[derive(Clone, Debug)]
pub struct GraphNode {
    /// What it is.
    pub kind: NodeKind,
    /// The kernel's name, or what is done.
    pub name: String,
    /// The operation that it is a part of.
    pub op: &'static str,
    /// Bytes of the operands that it reads.
    pub read_bytes: usize,
    /// Bytes of the operands that it writes.
    pub written_bytes: usize,
    /// How it runs, as far as the caller of the driver or of a library says.
    pub work: NodeWork,
}

/// How a node runs: blocks and threads of a kernel, multiplications and additions.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct NodeWork {
    /// Blocks of a kernel; 0 if it is not ours.
    pub blocks: usize,
    /// Threads of each block.
    pub threads: usize,
    /// The most loads of a thread of a kernel of which each waits for the one before.
    pub dependent_loads: usize,
    /// Multiplications and additions, of matmuls.
    pub flop: f64,
}

/// How many nodes of each kind the driver sees in a graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeCounts {
    /// Kernels, also those of libraries.
    pub kernels: usize,
    /// Copies.
    pub copies: usize,
    /// Fills.
    pub fills: usize,
    /// All others, such as the events that NCCL waits for and records.
    pub others: usize,
}

/// The notes of one capture.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    /// Of the operation that was begun last.
    operands: Vec<NotedOperand>,
    nodes: Vec<GraphNode>,
    /// Before and after each node, if nodes are timed; None for those of other libraries.
    marks: Vec<Option<[Mark; 2]>>,
}

#[derive(Debug)]
struct NotedOperand {
    address: u64,
    bytes: usize,
    reads: bool,
    writes: bool,
}

impl Notes {
    /// Another operation begins.
    pub(crate) fn begin(&mut self) {
        self.operands.clear();
    }

    /// An operand of the operation.
    pub(crate) fn operand(&mut self, address: u64, bytes: usize, [reads, writes]: [bool; 2]) {
        self.operands.push(NotedOperand {
            address,
            bytes,
            reads,
            writes,
        });
    }

    /// A node that uses the operands at these addresses. What an earlier node of the operation has
    /// written, it reads.
    pub(crate) fn node(
        &mut self,
        kind: NodeKind,
        name: String,
        op: &'static str,
        addresses: &[u64],
    ) {
        let [mut read_bytes, mut written_bytes] = [0; 2];
        for operand in &mut self.operands {
            if addresses.contains(&operand.address) {
                read_bytes += usize::from(operand.reads) * operand.bytes;
                written_bytes += usize::from(operand.writes) * operand.bytes;
                operand.reads |= operand.writes;
            }
        }
        if kind == NodeKind::Foreign {
            self.marks.push(None);
        }
        self.nodes.push(GraphNode {
            kind,
            name,
            op,
            read_bytes,
            written_bytes,
            work: NodeWork::default(),
        });
    }
}

thread_local! {
    static NOTES: RefCell<Notes> = RefCell::default();
    /// Whether what this thread launches is noted and timed.
    static IS_TIMED: Cell<bool> = const { Cell::new(false) };
}

/// Lets `note` add to what is known of the nodes, if this thread captures a graph or is timed.
pub(crate) fn note(note: impl FnOnce(&mut Notes)) {
    if is_capturing() || IS_TIMED.get() {
        NOTES.with_borrow_mut(note);
    }
}

/// Notes a node: see `Notes::node`.
pub(crate) fn node(
    kind: NodeKind,
    name: impl Display,
    op: &'static str,
    addresses: &[u64],
    work: NodeWork,
) {
    note(|notes| {
        notes.node(kind, name.to_string(), op, addresses);
        notes.nodes.last_mut().expect("just noted").work = work;
    });
}

/// Launches a node, between two events if this thread is timed.
pub(crate) fn launch<E>(
    queue: &Queue,
    launch: impl FnOnce() -> Result<(), E>,
) -> Outcome<Result<(), E>> {
    if !IS_TIMED.get() || is_capturing() {
        return Ok(launch());
    }
    let before = queue.record(true)?;
    let launched = launch();
    if launched.is_ok() {
        let marks = Some([before, queue.record(true)?]);
        NOTES.with_borrow_mut(|notes| notes.marks.push(marks));
    }
    Ok(launched)
}

/// Nodes, with the milliseconds that each took.
pub(crate) type TimedNodes = Vec<(GraphNode, Option<f32>)>;

/// What `body` launches on this thread, and how long it takes. Waits for all.
pub(crate) fn timed<R>(body: impl FnOnce() -> R) -> (R, Outcome<TimedNodes>) {
    /// Ends the timing, also if `body` panics.
    struct Timing;
    impl Drop for Timing {
        fn drop(&mut self) {
            IS_TIMED.set(false);
        }
    }
    NOTES.take();
    IS_TIMED.set(true);
    let timing = Timing;
    let result = body();
    drop(timing);
    let notes = NOTES.take();
    let took = |marks: Option<[Mark; 2]>| match marks {
        None => Ok(None),
        Some([before, after]) => {
            after.synchronize()?;
            after.milliseconds_since(&before).map(Some)
        }
    };
    let nodes = notes.nodes.into_iter().zip(notes.marks);
    let nodes = nodes.map(|(node, marks)| Ok((node, took(marks)?)));
    (result, nodes.collect())
}

/// Takes what was noted of this thread's capture.
pub(crate) fn take() -> Vec<GraphNode> {
    NOTES.take().nodes
}

/// Counts the nodes of `graph`, which the caller owns.
pub(crate) fn count(graph: CUgraph) -> Outcome<NodeCounts> {
    let mut count = 0;
    // SAFETY: the caller owns the graph; without room for nodes the driver only counts them.
    unsafe { driver!(cuGraphGetNodes(graph, ptr::null_mut(), &mut count)) }?;
    if count == 0 {
        // The driver refuses room for no nodes.
        return Ok(NodeCounts::default());
    }
    let mut nodes: Vec<CUgraphNode> = vec![ptr::null_mut(); count];
    // SAFETY: as above, with room for `count` nodes.
    unsafe { driver!(cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count)) }?;
    let mut counts = NodeCounts::default();
    for &node in nodes.iter().take(count) {
        // A number, because the driver may know kinds that cudarc's enum lacks.
        let mut kind = 0u32;
        // SAFETY: the node is of this graph; the driver writes an int.
        unsafe { driver!(cuGraphNodeGetType(node, &mut kind)) }?;
        // CUgraphNodeType: KERNEL, MEMCPY, MEMSET.
        *match kind {
            0 => &mut counts.kernels,
            1 => &mut counts.copies,
            2 => &mut counts.fills,
            _ => &mut counts.others,
        } += 1;
    }
    Ok(counts)
}
