//! What this thread's capture keeps for its graph: the memory that its work uses, and the ledger
//! rows that each launch books. `stream/graph.rs` begins and ends captures.

use std::cell::RefCell;
use std::sync::Arc;

use super::nodes::{NodeKind, Notes};
use super::queue::is_capturing;
use crate::storage::Storage;
use crate::transfer::ledger::CapturedRows;

/// What a graph keeps.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    memory: Vec<KeptStorage>,
    /// What each launch books in the ledger.
    pub(crate) booked: CapturedRows,
    /// What its nodes are.
    pub(crate) notes: Notes,
}

thread_local! {
    static KEPT: RefCell<Kept> = RefCell::default();
}

/// Memory that a graph uses.
#[derive(Debug)]
struct KeptStorage(Arc<Storage>);

impl Drop for KeptStorage {
    fn drop(&mut self) {
        self.0.count_graph(false);
    }
}

impl Kept {
    /// The memory that the graph uses.
    pub(crate) fn memory(&self) -> impl Iterator<Item = &Storage> {
        self.memory.iter().map(|kept| &*kept.0)
    }
}

/// Keeps memory that the captured work uses.
pub(crate) fn keep(storage: &Arc<Storage>) {
    KEPT.with_borrow_mut(|kept| {
        let mut known = kept.memory.iter().rev();
        if !known.any(|known| Arc::ptr_eq(&known.0, storage)) {
            storage.count_graph(true);
            kept.memory.push(KeptStorage(storage.clone()));
        }
    });
}

/// Lets `hold` note what each launch of the graph books; false if this thread captures nothing.
pub(crate) fn hold(hold: impl FnOnce(&mut CapturedRows)) -> bool {
    if is_capturing() {
        KEPT.with_borrow_mut(|kept| hold(&mut kept.booked));
        return true;
    }
    false
}

/// Lets `note` add to what the graph knows of its nodes, if this thread captures one.
pub(crate) fn note(note: impl FnOnce(&mut Notes)) {
    if is_capturing() {
        KEPT.with_borrow_mut(|kept| note(&mut kept.notes));
    }
}

/// Notes a node: see `Notes::node`.
pub(crate) fn node(
    kind: NodeKind,
    name: impl std::fmt::Display,
    op: &'static str,
    addresses: &[u64],
) {
    note(|notes| notes.node(kind, name.to_string(), op, addresses));
}

/// Takes what this thread's capture has kept.
pub(crate) fn take() -> Kept {
    KEPT.take()
}
