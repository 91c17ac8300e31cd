//! Which values are kept for backward, after which operation each is no longer needed, and in which
//! memory each is.

use super::op::{Activate, ActivateBackward, Op, Role};
use super::plan::{PassPlan, PlanFor};
use super::trace::TraceNode;
use crate::scratch::ScratchPool;

impl PassPlan {
    /// Whether a value is a tensor that a run makes or that comes from outside.
    fn is_computed(&self, id: usize) -> bool {
        let op = &self.nodes[id].op;
        op.role() != Role::Leaf || matches!(op, Op::Input(_))
    }

    /// Finds what is kept, and after which run each value is no longer needed.
    pub(super) fn free(&mut self) {
        let mut made = vec![false; self.nodes.len()];
        made[self.ends.x] = true;
        let outputs = self.forward.iter().flat_map(|run| &run.outputs);
        outputs.for_each(|&id| made[id] = true);
        let mut kept: Vec<usize> = self
            .backward
            .iter()
            .flat_map(|run| &run.inputs)
            .copied()
            .collect();
        kept.extend(self.ends.dx);
        kept.retain(|&id| made[id] && self.is_computed(id));
        kept.sort_unstable();
        kept.dedup();
        let stays: Vec<usize> = kept.iter().copied().chain([self.ends.y]).collect();
        for (runs, stays) in [
            (&mut self.forward, stays),
            (&mut self.backward, self.ends.dx.into_iter().collect()),
        ] {
            let mut seen = vec![false; self.nodes.len()];
            stays.into_iter().for_each(|id| seen[id] = true);
            for run in runs.iter_mut().rev() {
                for &id in run.inputs.iter().chain(&run.outputs) {
                    if !std::mem::replace(&mut seen[id], true) {
                        run.last.push(id);
                    }
                }
            }
        }
        self.kept = kept;
        let mut needed = vec![false; self.nodes.len()];
        for run in self.backward.iter_mut().rev() {
            let is_read = run.outputs.iter().any(|&id| needed[id]);
            let is_root = run.outputs.is_empty();
            run.is_for_input = !is_root && !is_read;
            if !run.is_for_input {
                run.inputs.iter().for_each(|&id| needed[id] = true);
            }
        }
    }

    /// Chooses memory by lifetime.
    pub(super) fn choose_pools(&mut self, how: PlanFor) {
        let pool = |(id, node): (usize, &TraceNode)| {
            // On the CPU backward computes such values again, so they live briefly.
            let is_brief = matches!(
                node.op,
                Op::Activate(Activate(of)) | Op::ActivateBackward(ActivateBackward(of))
                    if of.keeps_input()
            );
            let is_kept = self.kept.binary_search(&id).is_ok();
            if is_brief && how.is_cpu && how.is_training && !is_kept {
                ScratchPool::Brief
            } else if node.again.is_some() {
                ScratchPool::Again
            } else {
                ScratchPool::Kept
            }
        };
        self.pools = self.nodes.iter().enumerate().map(pool).collect();
    }
}
