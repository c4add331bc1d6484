//! The values.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ibverbs::SharedMemoryRegion;

use crate::Result;

/// The most bytes that all values may have together.
const CAPACITY: usize = 256 << 20;

/// A value. It never changes: a put replaces it, and whoever reads the old one keeps it until then.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    Small(Arc<[u8]>),
    /// The value is in memory that clients can read.
    Large(Arc<SharedMemoryRegion<'static, u8>>),
}

impl Value {
    fn len(&self) -> usize {
        match self {
            Self::Small(bytes) => bytes.len(),
            Self::Large(region) => region.len(),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Store {
    values: Mutex<Values>,
}

#[derive(Debug, Default)]
struct Values {
    by_key: HashMap<Vec<u8>, Value>,
    bytes: usize,
}

impl Store {
    fn lock(&self) -> MutexGuard<'_, Values> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, key: &[u8]) -> Option<Value> {
        self.lock().by_key.get(key).cloned()
    }

    pub(crate) fn put(&self, key: &[u8], value: Option<Value>) -> Result<()> {
        let mut values = self.lock();
        let old = values.by_key.get(key).map_or(0, Value::len);
        let new = value.as_ref().map_or(0, Value::len);
        let bytes = values.bytes - old + new;
        if bytes > CAPACITY && new > old {
            return Err("the store is full".into());
        }
        values.bytes = bytes;
        match value {
            Some(value) => values.by_key.insert(key.to_vec(), value),
            None => values.by_key.remove(key),
        };
        Ok(())
    }

    pub(crate) fn keys(&self) -> usize {
        self.lock().by_key.len()
    }
}
