//! The numbers by which the kernel knows files and directories.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};

use super::tree::Node;

/// The number of what is mounted.
pub(super) const ROOT: u64 = 1;

/// A directory's number, a name in it, and [`File::id`](super::tree::File::id).
type Key = (u64, OsString, u64);

/// All that the kernel knows. A number is never used again.
#[derive(Debug)]
pub(super) struct Inodes {
    known: HashMap<u64, Inode>,
    numbers: HashMap<Key, u64>,
    next: u64,
}

#[derive(Debug)]
struct Inode {
    node: Node,
    /// `None` for the root.
    key: Option<Key>,
    /// How often the kernel was told the number, and did not forget it.
    lookups: u64,
}

impl Inodes {
    pub(super) fn new(root: Node) -> Self {
        let known = HashMap::from([(ROOT, Inode { node: root, key: None, lookups: 1 })]);
        Self { known, numbers: HashMap::new(), next: ROOT + 1 }
    }

    pub(super) fn node(&self, number: u64) -> Option<Node> {
        self.known.get(&number).map(|inode| inode.node.clone())
    }

    /// Tells the kernel of a node: returns its number.
    pub(super) fn enter(&mut self, parent: u64, name: &OsStr, node: Node) -> u64 {
        let id = match &node {
            Node::Directory(_) => 0,
            Node::File(file) => file.id(),
        };
        let key = (parent, name.to_owned(), id);
        let number = *self.numbers.entry(key.clone()).or_insert(self.next);
        if number == self.next {
            self.next += 1;
        }
        match self.known.get_mut(&number) {
            Some(inode) => {
                inode.lookups += 1;
                inode.node = node;
            }
            None => drop(self.known.insert(number, Inode { node, key: Some(key), lookups: 1 })),
        }
        number
    }

    /// The kernel forgets `lookups` of the times that it was told a number.
    pub(super) fn forget(&mut self, number: u64, lookups: u64) {
        let Some(inode) = self.known.get_mut(&number).filter(|inode| inode.key.is_some()) else { return };
        inode.lookups = inode.lookups.saturating_sub(lookups);
        if inode.lookups == 0
            && let Some(key) = self.known.remove(&number).and_then(|inode| inode.key)
        {
            self.numbers.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use super::super::tree::Directory;
    use super::*;

    #[derive(Debug)]
    struct Empty;

    impl Directory for Empty {
        fn list(&self) -> io::Result<Vec<(OsString, Node)>> {
            Ok(Vec::new())
        }
    }

    #[test]
    fn a_number_is_known_until_the_kernel_forgets_it_and_is_not_used_again() {
        let node = || Node::Directory(Arc::new(Empty));
        let mut inodes = Inodes::new(node());
        let web = inodes.enter(ROOT, "web".as_ref(), node());
        assert_eq!(inodes.enter(ROOT, "web".as_ref(), node()), web);
        assert_ne!(inodes.enter(web, "web".as_ref(), node()), web);
        inodes.forget(web, 1);
        assert!(inodes.node(web).is_some());
        inodes.forget(web, 1);
        assert!(inodes.node(web).is_none());
        assert_ne!(inodes.enter(ROOT, "web".as_ref(), node()), web);
        inodes.forget(ROOT, 5);
        assert!(inodes.node(ROOT).is_some());
    }
}
