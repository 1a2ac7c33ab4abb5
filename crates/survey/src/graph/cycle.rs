//! The order in which layers can be gathered: bases first, loops apart.

/// All images: those on loops, in ascending order, and the others, each after the layer below it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Order {
    pub(super) on_cycles: Vec<usize>,
    pub(super) acyclic: Vec<usize>,
}

impl Order {
    /// The images on the loop that `at` is on, `at` first.
    pub(super) fn lap(&self, below: &[Option<usize>], at: usize) -> Vec<usize> {
        let mut lap = vec![at];
        let mut next = below[at].expect("on a loop");
        while next != at {
            lap.push(next);
            next = below[next].expect("on a loop");
        }
        lap
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mark {
    New,
    /// On the path that is being followed.
    Open,
    Done,
}

/// Orders images by who stands on whom: `below[i]` is the layer below `i`. Linear, without recursion.
pub(super) fn bottom_up(below: &[Option<usize>]) -> Order {
    let mut marks = vec![Mark::New; below.len()];
    let mut order = Order { on_cycles: Vec::new(), acyclic: Vec::with_capacity(below.len()) };
    let mut path = Vec::new();
    for start in 0..below.len() {
        let mut next = Some(start);
        while let Some(at) = next.filter(|&at| marks[at] == Mark::New) {
            marks[at] = Mark::Open;
            path.push(at);
            next = below[at];
        }
        // A path that met itself ends in a loop, which begins where it was met.
        if let Some(entry) = next.filter(|&at| marks[at] == Mark::Open) {
            let from = path.iter().position(|&at| at == entry).expect("open images are on the path");
            order.on_cycles.extend(&path[from..]);
            path.drain(from..).for_each(|at| marks[at] = Mark::Done);
        }
        path.iter().for_each(|&at| marks[at] = Mark::Done);
        order.acyclic.extend(path.drain(..).rev());
    }
    order.on_cycles.sort_unstable();
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn position(order: &Order, at: usize) -> usize {
        order.acyclic.iter().position(|&other| other == at).expect("not on a loop")
    }

    #[test]
    fn every_layer_comes_after_the_one_below_it() {
        // 4 on 3 on 0; 2 on 0; 1 alone.
        let below = [None, None, Some(0), Some(0), Some(3)];
        let order = bottom_up(&below);
        assert!(order.on_cycles.is_empty());
        assert_eq!(order.acyclic.len(), 5);
        for (at, below) in below.iter().enumerate() {
            if let Some(below) = below {
                assert!(position(&order, *below) < position(&order, at));
            }
        }
    }

    #[test]
    fn loops_are_apart_and_what_leads_into_them_is_not() {
        // 0 on itself; 1, 2, 3 in a ring; 4 on 5 on 2; 6 alone.
        let below = [Some(0), Some(2), Some(3), Some(1), Some(5), Some(2), None];
        let order = bottom_up(&below);
        assert_eq!(order.on_cycles, [0, 1, 2, 3]);
        assert_eq!(order.lap(&below, 2), [2, 3, 1]);
        assert_eq!(order.lap(&below, 0), [0]);
        assert!(position(&order, 5) < position(&order, 4));
        assert_eq!(order.acyclic.len(), 3);
    }

    #[test]
    fn a_chain_of_a_million_layers_needs_no_stack() {
        let below: Vec<_> = (0..1_000_000usize).map(|at| at.checked_sub(1)).collect();
        assert_eq!(bottom_up(&below).acyclic[999_999], 999_999);
    }
}
